"""Agreements between ranks: small host values, exchanged directly, apart from the tensors' traffic.

Everything here is CPU and gloo, so agreeing costs no GPU synchronisation and takes effect while
tensors are in flight. Every rank calls `exchange*` in the same order.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.comm.exchange import Exchange, Message
from poplar.comm.group import Group

T = TypeVar("T")

# Tags keep agreements apart from announcements and from tensors that travel on the same gloo group.
_EXCHANGE_TAGS = 1 << 28
_ANNOUNCE_TAGS = 1 << 29
_TAG_SPACE = 1 << 24


class Control:
    """The agreements of one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._exchanges = itertools.count()
        self._announcements = itertools.count()

    def exchange(self, values: Tensor, *, what: str) -> Callable[[], list[Tensor]]:
        """Start to exchange 1-D `values`, equally long everywhere; the result collects them."""
        group = self.group
        mine = values.contiguous()
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
        self._direct([payload] * self.group.size, theirs, what).wait()
        received: list[Any] = [pickle.loads(bytes(data.numpy())) for data in theirs]
        return received

    def announce(self, value: int) -> None:
        """Tell every other rank one integer; each of them calls `hear` with this rank."""
        self._direct_announcement(
            torch.tensor([value]), incoming=False, peers=self._others()
        ).wait()

    def hear(self, announcer: int) -> int:
        """The next integer that group rank `announcer` announces."""
        value = torch.zeros(1, dtype=torch.int64)
        self._direct_announcement(value, incoming=True, peers=[announcer]).wait()
        return int(value)

    def _others(self) -> list[int]:
        return [peer for peer in range(self.group.size) if peer != self.group.rank]

    def _direct(self, mine: list[Tensor], theirs: list[Tensor], what: str) -> Exchange:
        messages = [Message(peer, mine[peer], incoming=False) for peer in self._others()]
        messages += [Message(peer, theirs[peer], incoming=True) for peer in self._others()]
        tag = _EXCHANGE_TAGS + next(self._exchanges) % _TAG_SPACE
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)

    def _direct_announcement(self, value: Tensor, *, incoming: bool, peers: list[int]) -> Exchange:
        tag = _ANNOUNCE_TAGS + next(self._announcements) % _TAG_SPACE
        messages = [Message(peer, value, incoming=incoming) for peer in peers]
        what = "the announcement of the next collective"
        return Exchange(self.group, self.group.control_group, messages, tag=tag, what=what)
