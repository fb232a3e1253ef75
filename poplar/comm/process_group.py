"""The transport that always works: torch.distributed point-to-point, NCCL on CUDA, gloo on CPU.

The direct algorithm: each rank sends every peer the slice that the peer owns and adds what it
receives itself, in rank order and in fp32. For even shares on one host that moves the bytes of a
ring; it takes any shares, keeps the weights exact, and gives the same bits every time, none of
which NCCL's and gloo's own reduce-scatter offer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from poplar.comm.bucket import Bucket
from poplar.comm.communicator import Communicator, Pending, own_slice
from poplar.comm.exchange import Exchange, Message, tag_of
from poplar.comm.group import Group
from poplar.planning.layout import Layout, transfers

_TENSORS = 3


class ProcessGroupCommunicator(Communicator):
    """Uneven reduce-scatter and all-gather out of direct exchanges."""

    reduction_order = "rank"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._tags = itertools.count()
        self._unfinished: deque[_OneAfterTheOther] = deque()

    def reduce_scatter(
        self, bucket: Bucket, out: Tensor, *, accumulate: bool, what: str
    ) -> Pending:
        rank, size, layout = self.group.rank, self.group.size, bucket.layout
        own = layout.size(rank)
        received = torch.empty(size * own, dtype=bucket.data.dtype, device=bucket.data.device)
        messages = []
        for peer in self._peers():
            messages.append(Message(peer, own_slice(bucket.data, layout, peer), incoming=False))
            messages.append(Message(peer, received[peer * own : (peer + 1) * own], incoming=True))
        received[rank * own : (rank + 1) * own].copy_(own_slice(bucket.data, layout, rank))

        def add() -> None:
            bucket.codec.reduce(out, received.view(size, own).unbind(), accumulate)

        return self.exchange(messages, what, add if own else None)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        """A reduce-scatter, and a gather of what came out."""
        data, layout = bucket.data, bucket.layout
        own = own_slice(data, layout, self.group.rank)
        in_place = data.dtype is torch.float32
        total = own if in_place else torch.empty(own.numel(), device=data.device)
        reduced = self.reduce_scatter(bucket, total, accumulate=False, what=what)
        tag = self.reserve()  # now: ranks may wait in different orders

        def gather() -> Pending:
            if not in_place:
                own.copy_(total)
            return self.exchange(self._gathering(data, layout), what, tag=tag)

        return _OneAfterTheOther(reduced, gather, self._unfinished)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        mine = own_slice(data, layout, self.group.rank)
        if own is not None:
            mine.copy_(own)
        return self.exchange(self._gathering(data, layout), what)

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        if self.group.rank == source:
            messages = [Message(peer, data, incoming=False) for peer in self._peers()]
        else:
            messages = [Message(source, data, incoming=True)]
        self.exchange(messages, what).wait()

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        rank = self.group.rank
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
        self.exchange(messages, what).wait()
        return result

    def _gathering(self, data: Tensor, layout: Layout) -> list[Message]:
        mine = own_slice(data, layout, self.group.rank)
        messages = []
        for peer in self._peers():
            messages.append(Message(peer, mine, incoming=False))
            messages.append(Message(peer, own_slice(data, layout, peer), incoming=True))
        return messages

    def _peers(self) -> list[int]:
        """The others, nearest successor first, so that no rank is everybody's first target."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]

    def reserve(self) -> int:
        """A place in the order of exchanges, for one that is issued later. Collective."""
        return next(self._tags)

    def exchange(
        self,
        messages: list[Message],
        what: str,
        finish: Callable[[], None] | None = None,
        *,
        tag: int | None = None,
    ) -> Exchange:
        """Start to send and receive; `tag`, from `reserve`, may serve several at once. Collective
        where there is none.
        """
        group = self._group
        place = tag_of(group, _TENSORS, next(self._tags) if tag is None else tag)
        return Exchange(group, group.process_group, messages, tag=place, what=what, finish=finish)


class _OneAfterTheOther:
    """A collective of two, the second of which is issued when the first is over.

    Those that were issued before are finished first: ranks may wait in different orders, and would
    else wait for each other's second halves.
    """

    def __init__(
        self,
        first: Pending,
        then: Callable[[], Pending],
        unfinished: deque[_OneAfterTheOther],
    ) -> None:
        self._first = first
        self._then: Callable[[], Pending] | None = then
        self._unfinished = unfinished
        unfinished.append(self)

    def wait(self) -> float:
        """As `Pending.wait`."""
        held_up = 0.0
        while self._then is not None:
            held_up += self._unfinished.popleft()._finish()
        return held_up

    def _finish(self) -> float:
        assert self._then is not None
        then, self._then = self._then, None
        return self._first.wait() + then().wait()
