"""The transport over torch.distributed: NCCL on CUDA, gloo on the CPU. It works everywhere.

The default is the direct algorithm: each rank sends every peer the slice that the peer owns, and
adds what it receives in rank order and fp32. It supports any shares, keeps weights exact and is
deterministic, which the reduce-scatters of NCCL and gloo are not. `algorithms` has the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poplar.comm.algorithms import ALL_GATHERS, REDUCE_SCATTERS, Reduction
from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.column_gather import gather_columns
from poplar.comm.communicator import CachedBytes, Communicator, Work, own_slice
from poplar.comm.group import Group
from poplar.comm.host_memory.segment_pool import caches_memory
from poplar.comm.point_to_point import Message
from poplar.comm.shard_layout import Layout, transfers


class ProcessGroupCommunicator(Communicator):
    """Uneven reduce-scatter and all-gather from messages and even collectives."""

    def __init__(self, group: Group, reduce: str = "direct", gather: str = "direct") -> None:
        """`reduce` and `gather`: names in `REDUCE_SCATTERS` and `ALL_GATHERS`."""
        super().__init__(group)
        self._queue = CollectiveQueue(group)
        self._reduce, self._gather = REDUCE_SCATTERS[reduce], ALL_GATHERS[gather]
        self.name = f"process_group:{reduce}+{gather}"
        self.reduction_order = self._reduce.reduction_order
        self.waits_on_stream = group.supports(torch.device("cuda"))

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Work:
        return self._reduce.run(self._queue, Reduction(bucket, out, accumulate, what, squares))

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        if own is not None:
            own_slice(data, layout, self.group.rank).copy_(own)
        return self._gather(self._queue, data, layout, what)

    def gather_columns(
        self, data: Tensor, rows: Layout, columns: Sequence[tuple[int, int]], *, what: str
    ) -> Work:
        if all(needed == (0, data.shape[1]) for needed in columns):
            return super().gather_columns(data, rows, columns, what=what)
        return gather_columns(self._queue, data, rows, columns, what)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        *,
        what: str,
    ) -> Work:
        return all_to_all(self._queue, received, sent, received_sizes, sent_sizes, what)

    def cached_bytes(self) -> CachedBytes:
        return CachedBytes(private=self._queue.buffers.idle_bytes())

    def trim(self) -> None:
        self._queue.buffers.trim(caches_memory())

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        broadcast(self._queue, data, source, what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return reshard(self._queue, shard, old, new, what)


def broadcast(queue: CollectiveQueue, data: Tensor, source: int, what: str) -> None:
    """As `Communicator.broadcast`: one native call; on the host, messages from the source."""
    if queue.calls_natively(data.device):
        group = queue.group.process_group

        def start() -> list[dist.Work | None]:
            return [dist.broadcast(data, group=group, group_src=source, async_op=True)]

        queue.issue(start, data.device, what).wait()
    else:
        is_source = queue.group.rank == source
        peers = queue.peers() if is_source else [source]
        messages = [Message(peer, data, incoming=not is_source) for peer in peers]
        queue.exchange(messages, what).wait()


def all_to_all(
    queue: CollectiveQueue,
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    what: str,
    position: int | None = None,
) -> Work:
    """As `Communicator.all_to_all`: one native call; on the host, messages.

    `position` is one that was reserved earlier, if any.
    """
    if queue.calls_natively(sent.device):
        splits = list(received_sizes), list(sent_sizes)

        def start() -> list[dist.Work | None]:
            group = queue.group.process_group
            return [dist.all_to_all_single(received, sent, *splits, group=group, async_op=True)]

        return queue.issue(start, sent.device, what)
    rank = queue.group.rank
    outgoing, incoming = sent.split(list(sent_sizes)), received.split(list(received_sizes))
    incoming[rank].copy_(outgoing[rank])
    messages = []
    for peer in queue.peers():
        messages.append(Message(peer, outgoing[peer], incoming=False))
        messages.append(Message(peer, incoming[peer], incoming=True))
    return queue.exchange(messages, what, position=position)


def reshard(queue: CollectiveQueue, shard: Tensor, old: Layout, new: Layout, what: str) -> Tensor:
    """As `Communicator.reshard`, by an all-to-all."""
    rank, moves = queue.group.rank, transfers(old, new)
    result = torch.empty(new.size(rank), dtype=shard.dtype, device=shard.device)
    sent, received = [0] * queue.group.size, [0] * queue.group.size
    for move in moves:  # at most one for each pair of ranks, because slices are contiguous
        if move.source == rank:
            sent[move.target] = move.stop - move.start
        if move.target == rank:
            received[move.source] = move.stop - move.start
    all_to_all(queue, result, shard, received, sent, what).wait()
    return result
