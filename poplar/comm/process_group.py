"""The transport that always works: torch.distributed, NCCL on CUDA, gloo on the CPU.

By default the direct algorithm: each rank sends every peer the slice that the peer owns and adds
what it receives itself, in rank order and in fp32. It takes any shares, keeps the weights exact,
and gives the same bits every time, none of which NCCL's and gloo's own reduce-scatter offer. Others
are in `algorithms`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poplar.comm.algorithms import ALL_GATHERS, REDUCE_SCATTERS, gather_directly
from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.group import Group
from poplar.comm.point_to_point import Message
from poplar.comm.segment_pool import keeps_memory
from poplar.comm.shard_layout import Layout, transfers


class ProcessGroupCommunicator(Communicator):
    """Uneven reduce-scatter and all-gather out of messages and of even collectives."""

    def __init__(self, group: Group, reduce: str = "direct", gather: str = "direct") -> None:
        """`reduce` and `gather`: names in `REDUCE_SCATTERS` and `ALL_GATHERS`."""
        super().__init__(group)
        self._link = CollectiveQueue(group)
        self._reduce, self._gather = REDUCE_SCATTERS[reduce], ALL_GATHERS[gather]
        self.name = f"process_group:{reduce}+{gather}"
        self.reduction_order = self._reduce.reduction_order
        self.waits_on_stream = group.carries(torch.device("cuda"))

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        return self._reduce.run(self._link, bucket, out, accumulate, what, squares)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """A reduce-scatter, and a gather of what came out.

        The gather is direct: it is issued when the sum is there, so at another time on each rank,
        which the library's own collectives do not allow.
        """
        data, layout = bucket.data, bucket.layout
        own = own_slice(data, layout, self.group.rank)
        in_place = data.dtype is torch.float32
        total = own if in_place else own.new_empty(own.numel(), dtype=torch.float32)
        reduced = self.reduce_scatter(bucket, total, accumulate=False, what=what)
        place = self._link.reserve()  # now: ranks may wait in different orders

        def gather() -> Pending:
            if not in_place:
                own.copy_(total)
            return gather_directly(self._link, data, layout, what, place)

        if not self._link.group.is_on_host(data.device):
            reduced.wait()  # the stream does: the gather can be issued now, in order
            return gather()
        return self._link.one_after_the_other(reduced, gather, place)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        if own is not None:
            own_slice(data, layout, self.group.rank).copy_(own)
        return self._gather(self._link, data, layout, what)

    def trim(self) -> None:
        self._link.spare.trim(keeps_memory())

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        if self.group.rank == source:
            messages = [Message(peer, data, incoming=False) for peer in self._link.peers()]
        else:
            messages = [Message(source, data, incoming=True)]
        self._link.exchange(messages, what).wait()

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return reshard(self._link, shard, old, new, what)


def reshard(link: CollectiveQueue, shard: Tensor, old: Layout, new: Layout, what: str) -> Tensor:
    """As `Communicator.reshard`, by messages."""
    rank = link.group.rank
    result = torch.empty(new.size(rank), dtype=shard.dtype, device=shard.device)
    mine, target = old.bounds(rank)[0], new.bounds(rank)[0]
    messages = []
    for move in transfers(old, new):
        leaving = move.source == rank
        arriving = move.target == rank
        if leaving and arriving:
            result[move.start - target : move.stop - target].copy_(
                shard[move.start - mine : move.stop - mine]
            )
        elif leaving:
            part = shard[move.start - mine : move.stop - mine]
            messages.append(Message(move.target, part, incoming=False))
        elif arriving:
            part = result[move.start - target : move.stop - target]
            messages.append(Message(move.source, part, incoming=True))
    link.exchange(messages, what).wait()
    return result
