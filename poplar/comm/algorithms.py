"""Reduce-scatter and all-gather over uneven shards, built from what NCCL and gloo offer.

*direct*: every rank gets exactly the slices that it needs. For even shares it sends the same bytes
as a ring. On devices it is one native call: an all-to-all with split sizes, and for gathers of even
slices the library's all-gather. On gloo it is point-to-point messages.
*padded*: the library's collective on chunks as large as the largest slice, `n * largest` elements.
It uses the library's knowledge of the topology (rings, trees, in-network reduction).
*grouped*: one broadcast from, or one reduction to, each owner. No padding, one operation per owner.

All all-gather algorithms give the same bits. Reductions add in rank order, or in the library's own
order (`"library"`). 16-bit values always take a rank-order algorithm, because the library would
round after every addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Work, own_slice
from poplar.comm.point_to_point import Message
from poplar.comm.shard_layout import ALIGNMENT, Layout

RECEIVED_BYTES = 1 << 30
"""A rank receives at most this much of one reduction at a time, and as much of the next one.

A rank with the share `p` of `n` receives `n * p` times the bucket in all. With even shares a block
of a 7B model (772 MiB in fp32) still takes one call.
"""

# torch 2.13 renamed these functions; 2.10 to 2.12 have only the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Reduction:
    """One reduce-scatter; the arguments of `Communicator.reduce_scatter`."""

    bucket: Bucket
    out: Tensor
    accumulate: bool
    what: str
    squares: Tensor | None

    def add(self, parts: Sequence[Tensor]) -> None:
        """`out` = (or +=) the sum of these parts, by rank."""
        if self.out.numel():
            self.bucket.codec.reduce(self.out, parts, self.accumulate, self.squares)


@dataclass(frozen=True)
class ReduceScatter:
    """A reduce-scatter algorithm."""

    reduction_order: str
    run: Callable[[CollectiveQueue, Reduction], Work]


def _reduce_direct(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """Every rank receives its slice of all buckets, then sums them locally."""
    bucket, rank = reduction.bucket, queue.group.rank
    if queue.calls_natively(bucket.data.device):
        return _reduce_natively(queue, reduction)
    own, others = reduction.out.numel(), queue.group.size - 1
    received = queue.buffers.take(others * own, bucket.data)
    parts = list(received.view(others, own).unbind())
    parts.insert(rank, own_slice(bucket.data, bucket.layout, rank))

    def add() -> None:
        reduction.add(parts)
        queue.buffers.put_back(received)

    return queue.exchange(_slices_to_owners(queue, bucket, parts), reduction.what, add)


def _reduce_natively(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """One all-to-all; several if a rank would receive more than `RECEIVED_BYTES`.

    Each takes an equal part of every rank's slice. The next one is issued before the previous one
    is summed, so two buffers receive in turns. Both are allocated before the first call: if memory
    runs out, the reduction can be issued again.
    """
    bucket, out, squares = reduction.bucket, reduction.out, reduction.squares
    size, sizes = queue.group.size, bucket.layout.sizes
    slices, largest = bucket.data.split(sizes), max(sizes)
    count = max(1, -(-size * largest * bucket.data.element_size() // RECEIVED_BYTES))
    step = max(1, -(-largest // (count * ALIGNMENT))) * ALIGNMENT
    begins = range(0, max(largest, 1), step)
    buffers = [bucket.data.new_empty(size * min(step, out.numel())) for _ in begins[:2]]
    work: Work | None = None
    for number, begin in enumerate(begins):
        parts = [part[begin : begin + step] for part in slices]
        blocks = slice(begin // ALIGNMENT, (begin + step) // ALIGNMENT)
        sums = None if squares is None else squares[blocks]
        piece = replace(reduction, out=out[begin : begin + step], squares=sums)
        received = buffers[number % 2][: size * piece.out.numel()]
        issued = _issue_piece(queue, piece, received, parts if step < largest else None)
        if work is not None:
            work.wait()
        work = issued
    assert work is not None
    return work


def _issue_piece(
    queue: CollectiveQueue, piece: Reduction, received: Tensor, parts: list[Tensor] | None
) -> Work:
    """Send a part of a reduction with one call: `parts`, by owner; None: the whole bucket."""
    data, own, group = piece.bucket.data, piece.out.numel(), queue.group.process_group
    by_sender = list(received.view(queue.group.size, own).unbind())

    def start() -> list[dist.Work | None]:
        if parts is not None:
            return [dist.all_to_all(by_sender, parts, group=group, async_op=True)]
        splits = (own,) * queue.group.size, piece.bucket.layout.sizes
        return [dist.all_to_all_single(received, data, *splits, group=group, async_op=True)]

    def add() -> None:
        piece.add(by_sender)

    return queue.issue(start if data.numel() else list, data.device, piece.what, add)


def _slices_to_owners(
    queue: CollectiveQueue, bucket: Bucket, parts: Sequence[Tensor]
) -> list[Message]:
    """Send every peer its slice of the bucket, and receive this rank's slice of the peer's."""
    messages = []
    for peer in queue.peers():
        part = own_slice(bucket.data, bucket.layout, peer)
        messages.append(Message(peer, part, incoming=False))
        messages.append(Message(peer, parts[peer], incoming=True))
    return messages


def _reduce_padded(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """All-to-all of equal chunks, then a local sum."""
    sent, own = _pad_to_chunks(reduction.bucket), reduction.out.numel()
    received = queue.buffers.take(sent.numel(), sent)

    def start() -> list[dist.Work | None]:
        group = queue.group.process_group
        return [dist.all_to_all_single(received, sent, group=group, async_op=True)]

    def add() -> None:
        chunks = received.split(max(reduction.bucket.layout.sizes))
        reduction.add([chunk[:own] for chunk in chunks])
        queue.buffers.put_back(received)

    return queue.issue(start if sent.numel() else list, sent.device, reduction.what, add)


def _reduce_by_library(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """The library's reduce-scatter of equal chunks."""
    if reduction.bucket.data.dtype is not torch.float32:
        return _reduce_padded(queue, reduction)
    sent = _pad_to_chunks(reduction.bucket)
    total = sent.new_empty(sent.numel() // queue.group.size)

    def start() -> list[dist.Work | None]:
        return [_reduce_scatter(total, sent, group=queue.group.process_group, async_op=True)]

    def add() -> None:
        reduction.add([total[: reduction.out.numel()]])

    return queue.issue(start if sent.numel() else list, sent.device, reduction.what, add)


def _reduce_grouped(queue: CollectiveQueue, reduction: Reduction) -> Work:
    """One reduction to each owner."""
    bucket, rank = reduction.bucket, queue.group.rank
    if bucket.data.dtype is not torch.float32:
        return _reduce_direct(queue, reduction)
    # dist.reduce overwrites its input, and the bucket must stay unchanged.
    slices = [part.clone() for part in bucket.data.split(bucket.layout.sizes)]

    def start() -> list[dist.Work | None]:
        group = queue.group.process_group
        return [
            dist.reduce(part, group=group, group_dst=owner, async_op=True)
            for owner, part in enumerate(slices)
            if part.numel()
        ]

    def add() -> None:
        reduction.add([slices[rank]])

    return queue.issue(start, bucket.data.device, reduction.what, add)


def gather_direct(
    queue: CollectiveQueue, data: Tensor, layout: Layout, what: str, position: int | None = None
) -> Work:
    """As `Communicator.all_gather`; `position` is one that was reserved earlier, if any."""
    rank = queue.group.rank
    if not queue.calls_natively(data.device):
        slices, messages = data.split(layout.sizes), []
        for peer in queue.peers():
            messages.append(Message(peer, slices[rank], incoming=False))
            messages.append(Message(peer, slices[peer], incoming=True))
        return queue.exchange(messages, what, position=position)

    def start() -> list[dist.Work | None]:
        group = queue.group.process_group
        if layout.is_even:
            own = own_slice(data, layout, rank)
            return [_all_gather(data, own, group=group, async_op=True)]
        # Not `dist.all_gather`: NCCL makes one broadcast per rank of it, each with its own work.
        # Whether they are faster on some network ("grouped") has not been measured.
        parts = list(data.split(layout.sizes))
        own, parts[rank] = parts[rank], data[:0]
        sent = [own] * len(parts)
        sent[rank] = data[:0]
        return [dist.all_to_all(parts, sent, group=group, async_op=True)]

    return queue.issue(start if data.numel() else list, data.device, what)


def _gather_padded(queue: CollectiveQueue, data: Tensor, layout: Layout, what: str) -> Work:
    """The library's all-gather of equal chunks."""
    own = own_slice(data, layout, queue.group.rank)
    largest = max(layout.sizes)
    chunk = own.new_zeros(largest)
    chunk[: own.numel()].copy_(own)
    gathered = own.new_empty(queue.group.size * largest)

    def start() -> list[dist.Work | None]:
        return [_all_gather(gathered, chunk, group=queue.group.process_group, async_op=True)]

    def copy_out() -> None:
        for peer in queue.peers():
            part = own_slice(data, layout, peer)
            part.copy_(gathered[peer * largest : peer * largest + part.numel()])

    return queue.issue(start if largest else list, data.device, what, copy_out)


def _gather_grouped(queue: CollectiveQueue, data: Tensor, layout: Layout, what: str) -> Work:
    """One broadcast from each owner."""

    def start() -> list[dist.Work | None]:
        group = queue.group.process_group
        return [
            dist.broadcast(part, group=group, group_src=owner, async_op=True)
            for owner in range(layout.world_size)
            if (part := own_slice(data, layout, owner)).numel()
        ]

    return queue.issue(start, data.device, what)


REDUCE_SCATTERS = {
    "direct": ReduceScatter("rank", _reduce_direct),
    "padded": ReduceScatter("rank", _reduce_padded),
    "grouped": ReduceScatter("library", _reduce_grouped),
    "library": ReduceScatter("library", _reduce_by_library),
}
ALL_GATHERS: dict[str, Callable[[CollectiveQueue, Tensor, Layout, str], Work]] = {
    "direct": gather_direct,
    "padded": _gather_padded,
    "grouped": _gather_grouped,
}


def _pad_to_chunks(bucket: Bucket) -> Tensor:
    """Every slice padded to the size of the largest; the data itself if all are equal."""
    data, sizes = bucket.data, bucket.layout.sizes
    if data.numel() == max(sizes) * len(sizes):
        return data
    chunks = data.new_zeros(len(sizes), max(sizes))
    for chunk, part in zip(chunks, data.split(sizes), strict=True):
        chunk[: part.numel()].copy_(part)
    return chunks.view(-1)
