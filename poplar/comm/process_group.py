"""The transport over torch.distributed: NCCL on CUDA, gloo on the CPU. It works everywhere.

Each rank sends every peer the slice that the peer owns, and adds what it receives in rank order and
fp32. This supports any shares, keeps weights exact and is deterministic, which the reduce-scatters
of NCCL and gloo are not. For even shares it sends the same bytes as a ring. On devices a collective
is one native call; on gloo it is made of messages.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.bucket import Reduction
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import (
    CachedBytes,
    CallbackWork,
    Communicator,
    Splits,
    Work,
    own_slice,
)
from poplar.comm.group import Group
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.comm.stream_work import StreamWork

RECEIVED_BYTES = 1 << 30
"""A rank receives at most this much of one reduction at a time, and as much of the next one.

A rank with the share `p` of `n` receives `n * p` times the bucket in all. With even shares a block
of a 7B model (772 MiB in fp32) still takes one call.
"""

# torch 2.13 renamed this function; 2.10 to 2.12 have only the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupCommunicator(Communicator):
    """Uneven reduce-scatters and gathers from messages and all-to-alls."""

    name = "process_group"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.queue = CollectiveQueue(group)
        self.waits_on_stream = group.supports(torch.device("cuda"))

    def reduce(self, reduction: Reduction) -> Work:
        bucket, queue = reduction.bucket, self.queue
        if queue.calls_natively(bucket.data.device):
            return _reduce_natively(queue, reduction)
        sizes, others = bucket.wire_layout.sizes, self.group.size - 1
        own = sizes[self.group.rank]
        received = queue.buffers.take(others * own, bucket.data.dtype, bucket.data.device)
        slices, parts = bucket.data.split(sizes), [*received.view(others, own)]
        parts.insert(self.group.rank, slices[self.group.rank])

        def add() -> None:
            reduction.add(parts)
            queue.buffers.put_back(received)

        return CallbackWork(queue.exchange(parts, slices, reduction.what), add)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        if own is not None:
            own_slice(data, layout, self.group.rank).copy_(own)
        return gather(self.queue, data, layout, what)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        return all_to_all(self.queue, received, sent, sizes, what)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        if not self.queue.calls_natively(data.device):
            super().broadcast(data, source, what=what)
            return
        group = self.group.process_group
        call = partial(dist.broadcast, data, group=group, group_src=source, async_op=True)
        StreamWork(self.group, call, data.device, what).wait()

    def cached_bytes(self) -> CachedBytes:
        return CachedBytes(private=self.queue.buffers.idle_bytes())

    def trim(self) -> None:
        self.queue.buffers.trim()

    def end_step(self) -> None:
        self.queue.buffers.release_unused()


def gather(
    queue: CollectiveQueue, data: Tensor, layout: Layout, what: str, position: int | None = None
) -> Work:
    """As `Communicator.all_gather`; `position` is one that was reserved earlier, if any."""
    rank, group = queue.group.rank, queue.group.process_group
    if not queue.calls_natively(data.device):
        slices = data.split(layout.sizes)
        return queue.exchange(slices, [slices[rank]] * len(slices), what, position=position)
    own = own_slice(data, layout, rank)
    if layout.is_even:
        call = partial(_all_gather, data, own, group=group, async_op=True)
    else:
        # Not `dist.all_gather`: NCCL makes one broadcast per rank of it, each with its own work.
        parts, sent = list(data.split(layout.sizes)), [own] * layout.world_size
        parts[rank] = sent[rank] = data[:0]
        call = partial(dist.all_to_all, parts, sent, group=group, async_op=True)
    return StreamWork(queue.group, call if data.numel() else None, data.device, what)


def all_to_all(
    queue: CollectiveQueue,
    received: Tensor,
    sent: Tensor,
    sizes: Splits,
    what: str,
    position: int | None = None,
) -> Work:
    """As `Communicator.all_to_all`; `position` is one that was reserved earlier, if any."""
    if queue.calls_natively(sent.device):
        group, splits = queue.group.process_group, (list(sizes.received), list(sizes.sent))
        call = partial(dist.all_to_all_single, received, sent, *splits, group=group, async_op=True)
        return StreamWork(queue.group, call, sent.device, what)
    rank = queue.group.rank
    outgoing, incoming = sent.split(list(sizes.sent)), received.split(list(sizes.received))
    incoming[rank].copy_(outgoing[rank])
    return queue.exchange(incoming, outgoing, what, position=position)


def _reduce_natively(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """One all-to-all; several if a rank would receive more than `RECEIVED_BYTES`.

    Each takes an equal part of every rank's slice. The next one is issued before the previous one
    is summed, so two buffers receive in turns. Both are allocated before the first call: if memory
    runs out, the reduction can be issued again.
    """
    bucket, out, squares = reduction.bucket, reduction.out, reduction.squares
    size, largest, on_wire = queue.group.size, max(bucket.layout.sizes), bucket.codec.wire_numel
    slices = bucket.data.split(bucket.wire_layout.sizes)
    count = max(1, -(-size * on_wire(largest) * bucket.data.element_size() // RECEIVED_BYTES))
    step = max(1, -(-largest // (count * ALIGNMENT))) * ALIGNMENT
    begins = range(0, max(largest, 1), step)
    buffers = [bucket.data.new_empty(size * on_wire(min(step, out.numel()))) for _ in begins[:2]]
    work: Work | None = None
    for number, begin in enumerate(begins):
        parts = [part[on_wire(begin) : on_wire(begin + step)] for part in slices]
        blocks = slice(begin // ALIGNMENT, (begin + step) // ALIGNMENT)
        sums = None if squares is None else squares[blocks]
        piece = replace(reduction, out=out[begin : begin + step], squares=sums)
        received = buffers[number % 2][: size * on_wire(piece.out.numel())]
        issue = partial(_issue_piece, queue, piece, received, parts if step < largest else None)
        if work is None:
            work = issue()
            continue
        with queue.after_a_call():
            issued = issue()
            work.wait()
        work = issued
    assert work is not None
    return work


def _issue_piece(
    queue: CollectiveQueue, piece: Reduction, received: Tensor, parts: list[Tensor] | None
) -> Work:
    """Send a part of a reduction with one call: `parts`, by owner; None: the whole bucket."""
    bucket, group = piece.bucket, queue.group.process_group
    data, own = bucket.data, bucket.codec.wire_numel(piece.out.numel())
    by_sender = list(received.view(queue.group.size, own))
    if parts is not None:
        call = partial(dist.all_to_all, by_sender, parts, group=group, async_op=True)
    else:
        splits = (own,) * queue.group.size, bucket.wire_layout.sizes
        call = partial(dist.all_to_all_single, received, data, *splits, group=group, async_op=True)
    work = StreamWork(queue.group, call if data.numel() else None, data.device, piece.what)
    return CallbackWork(work, partial(piece.add, by_sender))
