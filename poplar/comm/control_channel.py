"""Agreements between ranks: small host values, exchanged directly, apart from the tensors' traffic.

Everything here is on the CPU, by shared memory or gloo, so agreeing costs no GPU synchronisation
and takes effect while tensors are in flight. Every rank calls `exchange*` in the same order.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.comm.copies import to_bytes
from poplar.comm.group import Group
from poplar.comm.point_to_point import Exchange, Message, tag_of
from poplar.comm.rendezvous import Rendezvous
from poplar.comm.shared_memory_work import SharedMemoryWork

T = TypeVar("T")

# Tags keep agreements apart from announcements, and from tensors on the same gloo group.
_EXCHANGES, _ANNOUNCEMENTS = 1, 2


class Control:
    """The agreements of one group."""

    def __init__(self, group: Group, board: Rendezvous | None = None) -> None:
        """With a board, which must be this control's own, exchanges go through shared memory."""
        self.group = group
        self._board = board
        self._exchanges = itertools.count()
        self._announcements = itertools.count()
        self._announced: list[Exchange] = []

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange 1-D `values`, equally long everywhere; the result collects them."""
        group = self.group
        mine = values.contiguous()
        if self._board is not None:
            return self._exchange_on(self._board, mine, what)
        theirs = [torch.empty_like(mine) for _ in range(group.size)]
        theirs[group.rank] = mine
        pending = self._direct([mine] * group.size, theirs, what)

        def collect() -> list[Tensor]:
            pending.wait()
            return theirs

        return collect

    def exchange_objects(self, value: T, *, what: str) -> list[T]:
        """Every rank's `value` (picklable), in rank order. Collective."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.exchange(torch.tensor([payload.numel()]), what=what)()
        theirs = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        theirs[self.group.rank] = payload
        if self._board is not None:
            theirs = self._exchange_on(self._board, payload, what, [int(s) for s in sizes])()
        else:
            self._direct([payload] * self.group.size, theirs, what).wait()
        received: list[Any] = [pickle.loads(to_bytes(data)) for data in theirs]
        return received

    def announce(self, value: int) -> None:
        """Tell every other rank one integer, without waiting for anyone.

        Each of them calls `hear` with this rank; `flush` ends it here.
        """
        message = torch.tensor([value])
        pending = self._direct_announcement(message, incoming=False, peers=self._others())
        self._announced.append(pending)

    def flush(self) -> None:
        """Wait until all that this rank announced has left it."""
        while self._announced:
            self._announced.pop(0).wait()

    def hear(self, announcer: int) -> int:
        """The next integer that group rank `announcer` announces."""
        value = torch.zeros(1, dtype=torch.int64)
        self._direct_announcement(value, incoming=True, peers=[announcer]).wait()
        return int(value)

    def _exchange_on(
        self, board: Rendezvous, mine: Tensor, what: str, sizes: Sequence[int] | None = None
    ) -> Callable[[], list[Tensor]]:
        numels = [mine.numel()] * self.group.size if sizes is None else sizes
        collective = board.post(mine)
        theirs: list[Tensor] = []

        def read() -> None:
            for peer, numel in enumerate(numels):
                if peer == self.group.rank:
                    theirs.append(mine)
                else:
                    part = board.posted_by(peer, collective, mine.dtype, 0, numel, of=numel)
                    theirs.append(part.clone())

        pending = SharedMemoryWork(board, collective, what, read)

        def collect() -> list[Tensor]:
            pending.wait()
            return theirs

        return collect

    def _others(self) -> list[int]:
        return [peer for peer in range(self.group.size) if peer != self.group.rank]

    def _direct(self, mine: list[Tensor], theirs: list[Tensor], what: str) -> Exchange:
        messages = [Message(peer, mine[peer], incoming=False) for peer in self._others()]
        messages += [Message(peer, theirs[peer], incoming=True) for peer in self._others()]
        tag = tag_of(self.group, _EXCHANGES, next(self._exchanges))
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)

    def _direct_announcement(self, value: Tensor, *, incoming: bool, peers: list[int]) -> Exchange:
        tag = tag_of(self.group, _ANNOUNCEMENTS, next(self._announcements))
        messages = [Message(peer, value, incoming=incoming) for peer in peers]
        what = "the announcement of the next collective"
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)
