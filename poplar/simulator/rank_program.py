"""What a rank does in a step, in order: compute, issue a collective, wait for one.

One programme per ZeRO stage, each as its strategy in the engine acts. All ranks issue the same
collectives in the same order, so a collective goes by its number in that order.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from poplar.planner.communication_schedule import buffers_of, units_of
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import buffers_in_flight

_AT_ONCE = -1
"""The number of a collective that never was: nobody waits for it."""


class Senders(Enum):
    """Whose data a rank needs before a collective is over for it."""

    EVERYONE = 0
    OWNERS = 1
    """A gather: of all ranks with a share."""
    EVERYONE_TO_OWNERS = 2
    """A reduction: an owner needs everybody's gradients, a rank without a share needs none."""


class Collective(NamedTuple):
    """What all ranks issue once, in one order."""

    what: str
    unit: int | None
    seconds: float
    """For which it occupies the links of every rank."""
    senders: Senders
    stops: bool = False
    """No compute at all runs under it; otherwise as the cluster's `overlap` says."""


class Compute(NamedTuple):
    """Work of the compute stream."""

    what: str
    unit: int | None
    pass_index: int | None
    seconds: float
    """Undisturbed."""


class Issue(NamedTuple):
    """Queue the next collective on the communication stream, and go on."""

    collective: Collective
    pass_index: int | None


class Wait(NamedTuple):
    """Go on when a collective is over for this rank."""

    number: int


Action = Compute | Issue | Wait


@dataclass(frozen=True, kw_only=True)
class Load:
    """What tells one rank from another: ranks of equal loads do the same at the same time."""

    passes: tuple[float, ...]
    """Seconds of each; 0 for one without samples."""
    optimizer: float
    """Seconds."""
    owns: bool
    """It has a share of what is sharded."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is the same for all ranks."""

    parts: tuple[float, ...]
    """By unit, its fraction of the model's elements, and so of each pass and each collective."""
    backward_fraction: float
    in_flight: int
    """Reductions that may be under way at a time."""
    resident: frozenset[int]
    """Units that stay gathered until a pass is over, and are reduced last."""
    persistent: frozenset[int]
    """Units that stay gathered until the step's passes are over."""
    reduce: tuple[tuple[Collective, ...], ...]
    """By unit, one for each of its buffers."""
    gather: tuple[Collective, ...]
    """By unit: the parameters at stage 3, the reduced gradients at stage 0."""
    publish: tuple[Collective, ...]
    """By unit: the gather of what the optimizer changed."""
    synchronization: Collective
    """What a meeting costs beyond its collectives."""
    agreement: Collective
    """Ranks agree that the step is good; what a step costs beyond all else."""
    optimizer_change: float
    """At most 0: added to the optimizer's seconds of every rank."""

    @classmethod
    def of(cls, costs: StageCosts, shares: Sequence[float]) -> Work:
        """The work under the shares of a plan, with the costs of its stage.

        [Note: negative residuals]
        A meeting that was measured to cost less than its collectives had faster collectives: all
        of them shrink. A step that did has a faster gather of the new values, and after that a
        faster optimizer.
        """
        model = costs.cluster.model
        numels = units_of(model, costs.stage)
        parts = tuple(numel / model.numel for numel in numels)
        gather, reduce = costs.communication(shares)
        residual = costs.synchronization_residual
        whole = costs.schedule.gathers * gather + reduce
        shrunk = max(0.0, 1.0 + min(0.0, residual) / whole) if whole else 1.0
        slowest = max(costs.optimizer_seconds(rank, share) for rank, share in enumerate(shares))
        once = costs.cluster.network.step_seconds[costs.stage] + min(0.0, slowest)
        left = costs.gather_after_step_seconds(shares) + min(0.0, once)

        def by_unit(what: str, seconds: float, senders: Senders) -> tuple[Collective, ...]:
            return tuple(
                Collective(what, unit, seconds * part, senders) for unit, part in enumerate(parts)
            )

        whole_reductions = by_unit("reduce", shrunk * reduce, Senders.EVERYONE_TO_OWNERS)
        return cls(
            parts=parts,
            backward_fraction=costs.cluster.backward_fraction,
            in_flight=buffers_in_flight(model, costs.stage),
            resident=frozenset(model.resident_units if costs.stage == 3 else ()),
            persistent=costs.persistent,
            reduce=tuple(map(_by_buffer, whole_reductions, numels)),
            gather=by_unit("gather", shrunk * gather, Senders.OWNERS),
            publish=by_unit("publish", max(0.0, left), Senders.OWNERS),
            synchronization=_beyond_collectives("synchronization", max(0.0, residual)),
            agreement=_beyond_collectives("agreement", max(0.0, once)),
            optimizer_change=min(0.0, left),
        )


def _by_buffer(reduction: Collective, numel: int) -> tuple[Collective, ...]:
    """A unit's reduction as the engine issues it: a large unit has several buffers."""
    buffers = buffers_of(numel)
    return (reduction._replace(seconds=reduction.seconds / buffers),) * buffers


def _beyond_collectives(what: str, seconds: float) -> Collective:
    return Collective(what, None, seconds, Senders.EVERYONE, stops=True)


class Programme(ABC):
    """One rank's step."""

    holds_up: ClassVar[bool] = True
    """Whether the backward waits until the reductions that are under way are few enough."""

    def __init__(self, work: Work, load: Load) -> None:
        self.work = work
        self.load = load
        self.units = range(len(work.parts))
        self._issued = 0
        self._pending: deque[int] = deque()

    def actions(self) -> Iterator[Action]:
        """Everything this rank does in a step, in order."""
        yield from self.passes()
        yield from self.settle()
        yield self.issue(self.work.agreement, None)
        yield Wait(self.last)
        seconds = max(0.0, self.load.optimizer + self.work.optimizer_change)
        yield Compute("optimizer", None, None, seconds)
        yield from self.publish()

    @abstractmethod
    def passes(self) -> Iterator[Action]:
        """All passes, and the reductions that they lead to."""

    def settle(self) -> Iterator[Action]:
        """Wait until the mean gradient is where the optimizer reads it."""
        yield from self._drain(0)
        yield Wait(self.last)

    def publish(self) -> Iterator[Action]:
        """Gather what the optimizer changed."""
        for collective in self.work.publish:
            yield self.issue(collective, None)
        yield Wait(self.last)

    @property
    def last(self) -> int:
        """The number of the collective that was issued last; -1: none was."""
        return self._issued - 1

    def issue(self, collective: Collective, pass_index: int | None) -> Issue:
        self._issued += 1
        return Issue(collective, pass_index)

    def reduce(self, unit: int, index: int | None) -> Iterator[Action]:
        for buffer in self.work.reduce[unit]:
            if self.holds_up:
                yield from self._drain(self.work.in_flight - 1)
            yield self.issue(buffer, index)
            self._pending.append(self.last)

    def gather(self, unit: int, index: int | None) -> Issue:
        return self.issue(self.work.gather[unit], index)

    def meet(self, index: int | None) -> Iterator[Action]:
        if self.work.synchronization.seconds:
            yield self.issue(self.work.synchronization, index)

    def forward(self, unit: int, index: int) -> Compute:
        seconds = self.load.passes[index] * (1.0 - self.work.backward_fraction)
        return Compute("forward", unit, index, seconds * self.work.parts[unit])

    def backward(self, unit: int, index: int) -> Compute:
        seconds = self.load.passes[index] * self.work.backward_fraction
        return Compute("backward", unit, index, seconds * self.work.parts[unit])

    def reducing_pass(self, index: int | None) -> Iterator[Action]:
        """A pass that reduces each unit when its backward is over; None: one without samples."""
        if index is not None:
            yield from (self.forward(unit, index) for unit in self.units)
        for unit in reversed(self.units):
            if index is not None:
                yield self.backward(unit, index)
            yield from self.reduce(unit, index)
        yield from self.meet(index)

    def _drain(self, leave: int) -> Iterator[Action]:
        while len(self._pending) > leave:
            yield Wait(self._pending.popleft())


class ShardedOptimizer(Programme):
    """Passes add up on the rank; its last one reduces. New values travel after the optimizer.

    What cannot be reduced yet waits in the sums, and holds nobody up.
    """

    holds_up = False

    def passes(self) -> Iterator[Action]:
        own = [index for index, seconds in enumerate(self.load.passes) if seconds]
        for index in own[:-1]:
            yield from (self.forward(unit, index) for unit in self.units)
            yield from (self.backward(unit, index) for unit in reversed(self.units))
        yield from self.reducing_pass(own[-1] if own else None)


class Replicated(ShardedOptimizer):
    """Each reduced slice is gathered under the next reduction; nothing travels afterwards."""

    def reduce(self, unit: int, index: int | None) -> Iterator[Action]:
        yield from super().reduce(unit, index)
        if unit + 1 in self.units:
            yield self.gather(unit + 1, index)

    def settle(self) -> Iterator[Action]:
        yield self.gather(0, None)
        yield from super().settle()

    def publish(self) -> Iterator[Action]:
        yield from ()


class ShardedGradients(Programme):
    """Every pass reduces. A rank whose pass is over goes on, as far as its reductions let it."""

    def passes(self) -> Iterator[Action]:
        for index, seconds in enumerate(self.load.passes):
            yield from self.reducing_pass(index if seconds else None)


class ShardedParameters(Programme):
    """Each unit is gathered while the one before it runs, and again in the backward.

    The last unit is still there when the backward begins, so it is gathered once, as those are
    that stay until the pass is over.
    """

    def passes(self) -> Iterator[Action]:
        for index, seconds in enumerate(self.load.passes):
            if seconds:
                yield from self._own_pass(index)
            else:
                yield from self._empty_pass(index)
            yield from self.meet(index)

    def publish(self) -> Iterator[Action]:
        """Nothing: the next gather sends the new shards."""
        yield from ()

    @property
    def _returning(self) -> list[int]:
        """Units that are given back after their forward, in the order in which they run."""
        return [unit for unit in self.units if unit not in self.work.resident]

    def _gathers(self, index: int) -> Iterator[tuple[int, bool]]:
        """The slots of a pass: whose they are, and whether anything travels."""
        persistent = self.work.persistent
        yield from ((unit, index == 0 or unit not in persistent) for unit in self.units)
        yield from ((unit, unit not in persistent) for unit in reversed(self._returning[:-1]))

    def _own_pass(self, index: int) -> Iterator[Action]:
        slots = self._gathers(index)
        again = frozenset(self._returning[:-1])
        arrivals: deque[int] = deque()

        def start_next() -> Iterator[Action]:
            for unit, travels in itertools.islice(slots, 1):
                if travels:
                    yield self.gather(unit, index)
                arrivals.append(self.last if travels else _AT_ONCE)

        def enter() -> Iterator[Action]:
            yield from start_next()
            yield Wait(arrivals.popleft())

        yield from start_next()
        for unit in self.units:
            yield from enter()
            yield self.forward(unit, index)
        for unit in reversed(self.units):
            if unit in again:
                yield from enter()
            yield self.backward(unit, index)
            if unit not in self.work.resident:
                yield from self.reduce(unit, index)
        yield from self._reduce_resident(index)

    def _empty_pass(self, index: int) -> Iterator[Action]:
        """The same collectives in the same order, nothing ahead: there is nothing to run under."""
        returning = self._returning
        for number, (unit, travels) in enumerate(self._gathers(index), start=1):
            if travels:
                yield self.gather(unit, index)
                yield Wait(self.last)
            if number > len(self.units):
                yield from self.reduce(returning.pop(), index)
        for unit in returning:
            yield from self.reduce(unit, index)
        yield from self._reduce_resident(index)

    def _reduce_resident(self, index: int) -> Iterator[Action]:
        for unit in sorted(self.work.resident):
            yield from self.reduce(unit, index)


PROGRAMMES: tuple[type[Programme], ...] = (
    Replicated,
    ShardedOptimizer,
    ShardedGradients,
    ShardedParameters,
)
"""By ZeRO stage."""
