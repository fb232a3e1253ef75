"""The hierarchical way where ranks of a host share no memory, as GPUs do: a process group on each
host, and messages between hosts.

As in `hierarchical`, a host's ranks add up what they have before anything leaves it, and pass on to
each other what has come in. Sums are taken on each host in rank order, rounded to what travels, and
added in the order of hosts: the same bits as there.

On CUDA the current stream waits for a host's own sum before the next step is issued, so that ranks
issue in one order: a reduction then hides less under the backward than a flat one does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from poplar.comm.algorithms import gather_directly
from poplar.comm.bucket import Bucket
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Communicator, Finished, Pending, own_slice
from poplar.comm.group import Group
from poplar.comm.host_topology import Hosts, Piece
from poplar.comm.point_to_point import Exchange, Message
from poplar.comm.process_group import ProcessGroupCommunicator, reshard
from poplar.comm.shard_layout import Layout


class NestedCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of ranks on each, NCCL or gloo."""

    name = "hierarchical:process_group"
    reduction_order = "host"

    def __init__(self, group: Group, hosts: Hosts, near: Group) -> None:
        """`near`: this host's ranks, ascending."""
        super().__init__(group)
        self._group, self._hosts = group, hosts
        self._host = hosts.host_of(group.rank)
        self._neighbours = hosts.members[self._host]
        self._far, self._near = CollectiveQueue(group), CollectiveQueue(near)
        self._within = ProcessGroupCommunicator(near)

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        place = self._far.reserve()
        return self._reduce(bucket, out, accumulate, squares, what, place)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        if own is not None:
            own_slice(data, layout, self.group.rank).copy_(own)
        return self._gather(data, layout, what, self._far.reserve(), self._near.reserve())

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """A reduce-scatter, and a gather of what came out."""
        data, layout = bucket.data, bucket.layout
        mine = own_slice(data, layout, self.group.rank)
        total = mine.new_empty(mine.numel(), dtype=torch.float32)
        adding = self.reduce_scatter(bucket, total, accumulate=False, what=what)
        # Reserved now: ranks may wait in different orders. The gather comes before the whole.
        far, near, place = self._far.reserve(), self._near.reserve(), self._far.reserve()

        def gather() -> Pending:
            mine.copy_(total)
            return self._gather(data, layout, what, far, near)

        return self._then(adding, gather, place, data)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        flat, host = data.view(-1), self._hosts.host_of(source)
        speakers = [ranks[0] for number, ranks in enumerate(self._hosts.members) if number != host]
        if self.group.rank == source:
            messages = [Message(speaker, flat, incoming=False) for speaker in speakers]
        else:
            messages = [Message(source, flat, incoming=True)]
            messages = messages if self.group.rank in speakers else []
        self._far.exchange(messages, what).wait()
        speaker = source if host == self._host else self._neighbours[0]
        self._within.broadcast(flat, self._neighbours.index(speaker), what=what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return reshard(self._far, shard, old, new, what)

    def _reduce(
        self,
        bucket: Bucket,
        out: Tensor,
        accumulate: bool,
        squares: Tensor | None,
        what: str,
        place: int,
    ) -> Pending:
        """Within the host what each rank owns and carries; then across; then the hosts' sums."""
        layout, data, rank = bucket.layout, bucket.data, self.group.rank
        parts = self._parts(layout)
        near = _layout([sum(piece.numel for piece in own) for own in parts])
        ordered = torch.cat([data[p.start : p.stop] for own in parts for p in own])
        mine = parts[self._neighbours.index(rank)]
        added = data.new_empty(sum(piece.numel for piece in mine), dtype=torch.float32)
        adding = self._within.reduce_scatter(
            Bucket(ordered, near, bucket.codec), added, accumulate=False, what=what
        )
        low, high = layout.bounds(rank)
        by_host = [
            data.new_empty(0 if host == self._host else high - low)  # the own one is at hand
            for host in range(len(self._hosts.members))
        ]

        def cross() -> Pending:
            travelling = added.to(data.dtype)
            by_host[self._host] = travelling[: high - low]
            messages = [
                Message(sender, by_host[host][piece.start - low : piece.stop - low], incoming=True)
                for host, sender, piece in self._crossing(layout)
                if piece.owner == rank
            ]
            begin = high - low
            for piece in mine[1:]:
                part = travelling[begin : begin + piece.numel]
                messages.append(Message(piece.owner, part, incoming=False))
                begin += piece.numel
            return self._far.exchange(messages, what, add, place=place)

        def add() -> None:
            if low < high:
                bucket.codec.reduce(out, by_host, accumulate, squares)

        return self._then(adding, cross, place, data)

    def _gather(self, data: Tensor, layout: Layout, what: str, far: int, near: int) -> Pending:
        """Each rank's slice to those who carry it; then within every host."""
        parts = self._parts(layout)
        within = _layout([sum(piece.numel for piece in own) for own in parts])
        shown = data.new_empty(within.numel)
        index = self._neighbours.index(self.group.rank)
        mine = own_slice(shown, within, index)
        low, high = layout.bounds(self.group.rank)
        mine[: high - low].copy_(data[low:high])
        begin, messages = high - low, []
        for piece in parts[index][1:]:
            part = mine[begin : begin + piece.numel]
            messages.append(Message(piece.owner, part, incoming=True))
            begin += piece.numel
        for _, carrier, piece in self._crossing(layout):
            if piece.owner == self.group.rank:
                part = data[piece.start : piece.stop]
                messages.append(Message(carrier, part, incoming=False))
        crossing: Exchange = self._far.exchange(messages, what, place=far)

        def place() -> None:
            begin = 0
            for piece in (piece for own in parts for piece in own):
                data[piece.start : piece.stop].copy_(shown[begin : begin + piece.numel])
                begin += piece.numel

        def spread() -> Pending:
            return Finished(gather_directly(self._near, shown, within, what, near), place)

        return self._then(crossing, spread, far, data)

    def _then(
        self, first: Pending, then: Callable[[], Pending], place: int, data: Tensor
    ) -> Pending:
        if self._group.is_on_host(data.device):
            return self._far.one_after_the_other(first, then, place)
        first.wait()  # the stream does: what follows can be issued now, in order
        return then()

    def _parts(self, layout: Layout) -> list[list[Piece]]:
        """By rank of this host: its slice, and behind it what it carries across."""
        duties = self._hosts.duties(layout, self._host)
        return [
            [Piece(rank, *layout.bounds(rank)), *pieces]
            for rank, pieces in zip(self._neighbours, duties, strict=True)
        ]

    def _crossing(self, layout: Layout) -> list[tuple[int, int, Piece]]:
        return self._hosts.crossing(layout, self._host)


def _layout(sizes: list[int]) -> Layout:
    return Layout((0, *accumulate(sizes)))
