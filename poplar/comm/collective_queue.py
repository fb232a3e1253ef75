"""What the algorithms of one process group share: their order, and how they are issued."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from poplar.comm.buffer_pool import BufferPool
from poplar.comm.communicator import Pending
from poplar.comm.group import Group
from poplar.comm.point_to_point import Exchange, Message, tag_of
from poplar.comm.work import InFlight

_TENSORS = 3


class CollectiveQueue:
    """Numbers the collectives of a group, which all its ranks issue in the same order."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.spare = BufferPool()
        self._places = itertools.count()
        self._unfinished: dict[int, _OneAfterTheOther] = {}

    def peers(self) -> list[int]:
        """The others, nearest successor first, so that no rank is everybody's first target."""
        rank, size = self.group.rank, self.group.size
        return [(rank + step) % size for step in range(1, size)]

    def reserve(self) -> int:
        """A place in the order, for an exchange that is issued later. Collective."""
        return next(self._places)

    def exchange(
        self,
        messages: Sequence[Message],
        what: str,
        finish: Callable[[], None] | None = None,
        *,
        place: int | None = None,
    ) -> Exchange:
        """Start to send and receive; a `place` may serve several. Collective without one."""
        group = self.group
        place = self.reserve() if place is None else place
        return Exchange(
            group,
            group.process_group,
            messages,
            tag=tag_of(group, _TENSORS, place),
            what=what,
            before=lambda: self._finish_before(place),
            finish=finish,
        )

    def call(
        self,
        start: Callable[[], Sequence[dist.Work | None]],
        device: torch.device,
        what: str,
        finish: Callable[[], None] | None = None,
    ) -> InFlight:
        """Issue collectives of torch.distributed itself, which needs everybody. Collective."""
        group, peers, place = self.group, sorted(self.peers()), self.reserve()
        return InFlight(
            group,
            lambda: [(work, peers) for work in start() if work is not None],
            what=what,
            peers=peers,
            holds_up=group.is_on_host(device),
            before=lambda: self._finish_before(place),
            finish=finish,
        )

    def one_after_the_other(
        self, first: Pending, then: Callable[[], Pending], place: int
    ) -> Pending:
        """A collective of two: the second is issued, at `place`, when the first is over."""
        both = _OneAfterTheOther(first, then, lambda: self._finish_before(place + 1))
        self._unfinished[place] = both
        return both

    def _finish_before(self, place: int) -> float:
        """Finish what goes on only while ranks wait for it: peers may be waiting for it now."""
        held_up = 0.0
        for earlier in [number for number in self._unfinished if number < place]:
            held_up += self._unfinished[earlier].finish()
            del self._unfinished[earlier]  # not if it failed: that is so for whoever waits next
        return held_up


class _OneAfterTheOther:
    def __init__(
        self, first: Pending, then: Callable[[], Pending], finish_in_order: Callable[[], float]
    ) -> None:
        """`finish_in_order` calls `finish`, after that of all that were issued before this one."""
        self._first, self._then, self._finish_in_order = first, then, finish_in_order
        self._error: Exception | None = None

    def wait(self) -> float:
        """As `Pending.wait`."""
        return self._finish_in_order()

    def finish(self) -> float:
        """Wait for the first, issue the second and wait for that."""
        if self._error is not None:  # whoever waits next hears the same, at once
            raise self._error
        try:
            return self._first.wait() + self._then().wait()
        except Exception as error:
            self._error = error
            raise
