"""The transport across hosts: shared memory on each, and every byte passes a network card once.

A host's ranks add up what they have before anything leaves it, and share what has come in. So a
host sends and receives what is not its own once, where the direct algorithm does once for each of
its ranks. The work across is cut evenly among the ranks of a host (`Hosts.duties`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket, Codec
from poplar.comm.collective_queue import CollectiveQueue
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.copies import copy
from poplar.comm.group import Group
from poplar.comm.host_topology import Hosts, Piece
from poplar.comm.point_to_point import Exchange, Message
from poplar.comm.process_group import reshard
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shard_layout import Layout
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.shared_memory_work import SharedMemoryWork
from poplar.errors import CollectiveTimeout
from poplar.system.trace import Trace

_PATIENCE = timedelta(seconds=2)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks of one host, numbered among themselves; in errors they keep their group's names."""

    group: Group
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.ranks.index(self.group.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def timeout(self) -> timedelta:
        # Whoever waits for another host gives up first, and says so to those who wait for it.
        return self.group.timeout + _PATIENCE

    @property
    def failures(self) -> list[CollectiveTimeout]:
        return self.group.failures

    @property
    def trace(self) -> Trace:
        return self.group.trace

    def failure(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        return self.group.failure(what, [self.ranks[peer] for peer in peers], cause)


class HierarchicalCommunicator(Communicator):
    """Uneven collectives over several hosts, with any number of CPU ranks on each.

    Sums are taken on each host in rank order, rounded to what travels, and added in the order of
    hosts. So bits depend on which ranks share a host.
    """

    name = "hierarchical"
    reduction_order = "host"

    def __init__(self, group: Group, hosts: Hosts, board: Rendezvous) -> None:
        """`board`: of this host's ranks, as `Neighbours`."""
        super().__init__(group)
        self._board = board
        self._near = SharedMemoryCommunicator(board)
        self._link = CollectiveQueue(group)
        self._hosts = hosts
        self._host = hosts.host_of(group.rank)
        self._neighbours = hosts.members[self._host]

    def buffer(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, codec: Codec | None = None
    ) -> Bucket:
        return self._near.buffer(layout, dtype, device, codec)

    def share(self, data: Tensor) -> Tensor:
        return self._near.share(data)

    def guard(self, data: Tensor) -> None:
        self._near.guard(data)

    def trim(self) -> None:
        self._near.trim()

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        rank, layout, data = self.group.rank, bucket.layout, bucket.data
        low, high = layout.bounds(rank)
        collective = self._board.post(data, unread=(low, high))
        by_host = [torch.empty(high - low, dtype=data.dtype) for _ in self._hosts.members]
        incoming = [
            Message(sender, by_host[host][piece.start - low : piece.stop - low], incoming=True)
            for host, sender, piece in self._crossing(layout)
            if piece.owner == rank
        ]
        turn = self._link.reserve()
        arriving = self._exchange(incoming, what, turn)

        def add() -> float:
            leaving = []
            for piece in self._duties(layout):
                total = torch.empty(piece.numel, dtype=data.dtype)
                self._add_near(bucket, collective, total, piece.start)
                message = Message(piece.owner, total, incoming=False)
                leaving.append(self._exchange([message], what, turn))
            self._add_near(bucket, collective, by_host[self._host], low)
            held_up = arriving.wait()
            if low < high:
                bucket.codec.reduce(out, by_host, accumulate, squares)
            return held_up + sum(exchange.wait() for exchange in leaving)

        return SharedMemoryWork(self._board, collective, what, add)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        mine = own_slice(data, layout, self.group.rank)
        read_in = self._board.read_in(data)
        if own is not None and own.data_ptr() != mine.data_ptr():
            copy(mine, own)
        shown = self._show(layout, data.dtype)
        copy(shown[: mine.numel()], mine)
        turn = self._link.reserve()
        arriving = self._arriving(shown, layout, what, turn)
        leaving = self._leaving(mine, layout, what, turn)
        collective = self._board.post(shown)

        def place() -> float:
            held_up = self._board.wait_until_over(read_in)
            held_up += self._place(collective, data, shown, layout, arriving, what)
            return held_up + leaving.wait()

        return SharedMemoryWork(self._board, collective, what, place)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """A reduce-scatter, and a gather of what came out."""
        data, layout = bucket.data, bucket.layout
        mine = own_slice(data, layout, self.group.rank)
        total = torch.empty(mine.numel(), dtype=torch.float32)
        self.reduce_scatter(bucket, total, accumulate=False, what=what)
        # Issued now, though there is nothing to show yet: ranks may wait in different orders.
        shown = self._show(layout, data.dtype)
        turn = self._link.reserve()
        arriving = self._arriving(shown, layout, what, turn)
        collective = self._board.post(shown)

        def place() -> float:
            # The sum is there: what was issued before is finished first. Neighbours may still read
            # what this rank brought to it.
            held_up = self._board.wait_until_over(collective - 1)
            mine.copy_(total)
            copy(shown[: mine.numel()], mine)
            leaving = self._leaving(mine, layout, what, turn)
            held_up += self._place(collective, data, shown, layout, arriving, what)
            return held_up + leaving.wait()

        return SharedMemoryWork(self._board, collective, what, place)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        flat = data.view(-1)
        host = self._hosts.host_of(source)
        speakers = [ranks[0] for number, ranks in enumerate(self._hosts.members) if number != host]
        if self.group.rank == source:
            messages = [Message(speaker, flat, incoming=False) for speaker in speakers]
        else:
            messages = [Message(source, flat, incoming=True)]
            messages = messages if self.group.rank in speakers else []
        with self._board.or_give_up(what):
            self._link.exchange(messages, what).wait()
        speaker = source if host == self._host else self._neighbours[0]
        self._near.broadcast(data, self._neighbours.index(speaker), what=what)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        with self._board.or_give_up(what):
            return reshard(self._link, shard, old, new, what)

    # Across hosts.

    def _exchange(self, messages: list[Message], what: str, turn: int) -> Exchange:
        """Waited for within a `Read`, which tells the neighbours if it fails; here if it can't
        even begin.
        """
        with self._board.or_give_up(what):
            return self._link.exchange(messages, what, place=turn)

    def _duties(self, layout: Layout) -> list[Piece]:
        """What this rank carries across for its host."""
        return self._hosts.duties(layout, self._host)[self._neighbours.index(self.group.rank)]

    def _crossing(self, layout: Layout) -> list[tuple[int, int, Piece]]:
        return self._hosts.crossing(layout, self._host)

    def _leaving(self, mine: Tensor, layout: Layout, what: str, turn: int) -> Exchange:
        """This rank's slice on its way to those who share it with their hosts."""
        rank, low = self.group.rank, layout.bounds(self.group.rank)[0]
        messages = [
            Message(carrier, mine[piece.start - low : piece.stop - low], incoming=False)
            for _, carrier, piece in self._crossing(layout)
            if piece.owner == rank
        ]
        return self._exchange(messages, what, turn)

    def _arriving(self, shown: Tensor, layout: Layout, what: str, turn: int) -> Exchange:
        """What this rank shares with its host, on its way here."""
        begin = layout.size(self.group.rank)
        messages = []
        for piece in self._duties(layout):
            messages.append(Message(piece.owner, shown[begin : begin + piece.numel], incoming=True))
            begin += piece.numel
        return self._exchange(messages, what, turn)

    # Within this host.

    def _add_near(self, bucket: Bucket, collective: int, out: Tensor, low: int) -> None:
        """The sum of the neighbours' elements from `low` on, rounded to what travels."""
        if out.numel():
            parts = self._near.parts(collective, bucket.data, low, out.numel())
            bucket.codec.reduce_each([out], parts)

    def _show(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Shared memory for this rank's slice, and behind it for what is its duty."""
        numel = layout.size(self.group.rank)
        return self._board.lend(dtype, numel + sum(piece.numel for piece in self._duties(layout)))

    def _place(
        self,
        collective: int,
        data: Tensor,
        shown: Tensor,
        layout: Layout,
        arriving: Exchange,
        what: str,
    ) -> float:
        """Complete `data` with what this rank has been sent and what its neighbours show."""
        held_up = arriving.wait()
        self._board.mark(collective)
        held_up += self._board.wait_until_marked(collective, what)
        duties = self._hosts.duties(layout, self._host)
        for number, (rank, pieces) in enumerate(zip(self._neighbours, duties, strict=True)):
            own = [] if rank == self.group.rank else [Piece(rank, *layout.bounds(rank))]
            begin = layout.size(rank) - sum(piece.numel for piece in own)
            for piece in (*own, *pieces):
                if piece.numel:
                    part = (
                        shown[begin : begin + piece.numel]
                        if rank == self.group.rank
                        else self._board.posted_by(
                            number, collective, data.dtype, begin, piece.numel
                        )
                    )
                    copy(data[piece.start : piece.stop], part)
                begin += piece.numel
        return held_up
