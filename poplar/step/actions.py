"""What a rank does in one step, in order: compute, issue a collective, wait for a collective.

One class per ZeRO stage, with the name and the order of the engine's strategy. All ranks issue the
same collectives in the same order, so a collective is identified by its position in that order.
Actions have no durations: the simulator adds them, and the closed form derives from the order which
communication can overlap which compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from poplar.step.units import StepUnits


class Compute(NamedTuple):
    """Work on the compute stream: `forward` or `backward` of a unit, or the `optimizer`."""

    what: str
    unit: int | None
    pass_index: int | None


class Issue(NamedTuple):
    """Queue the next collective on the communication stream, without waiting for it.

    `what` is `reduce`, `unshard` (stage 3), `all_gather_gradients` (stage 0),
    `all_gather_parameters` (after the optimizer), `synchronization` or `agreement`.
    """

    what: str
    unit: int | None
    pass_index: int | None


class Wait(NamedTuple):
    """Block the compute stream until a collective is complete on this rank."""

    position: int


Action = Compute | Issue | Wait


class RankActions(ABC):
    """The actions of one rank in one step."""

    limits_reductions: ClassVar[bool] = True
    """Whether the backward waits while `reductions_in_flight` reductions are incomplete."""

    def __init__(
        self, units: StepUnits, has_samples: Sequence[bool], *, synchronization: bool = False
    ) -> None:
        """`has_samples` is by pass. With `synchronization`, each synchronization ends with an extra
        collective, for the measured seconds beyond its collectives.
        """
        self._units = units
        self.has_samples = has_samples
        self.units = range(len(units.numels))
        self._synchronization = synchronization
        self._issued = 0
        in_flight = units.reductions_in_flight if self.limits_reductions else None
        self._reductions: deque[int] = deque(maxlen=in_flight)

    def step(self) -> Iterator[Action]:
        """All actions of a step."""
        yield from self.passes()
        yield self._wait_for_last()
        yield self._issue("agreement")
        yield self._wait_for_last()
        yield Compute("optimizer", None, None)
        yield from self.all_gather_parameters()

    @abstractmethod
    def passes(self) -> Iterator[Action]:
        """All passes, with the collectives before the optimizer."""

    def all_gather_parameters(self) -> Iterator[Action]:
        """All-gather the updated parameters."""
        for unit in self.units:
            yield self._issue("all_gather_parameters", unit)
        yield self._wait_for_last()

    def compute(self, index: int | None, *, reduces: bool = True) -> Iterator[Action]:
        """One pass. Each unit is reduced after its backward; None: only the reductions."""
        if index is not None:
            yield from (Compute("forward", unit, index) for unit in self.units)
        for unit in reversed(self.units):
            if index is not None:
                yield Compute("backward", unit, index)
            if reduces:
                yield from self.reduce(unit, index)
        if reduces:
            yield from self._synchronize(index)

    def reduce(self, unit: int, index: int | None) -> Iterator[Action]:
        for _ in self._units.buffers[unit]:
            if len(self._reductions) == self._reductions.maxlen:
                yield Wait(self._reductions[0])
            yield self._issue("reduce", unit, index)
            self._reductions.append(self._issued - 1)

    def _issue(self, what: str, unit: int | None = None, index: int | None = None) -> Issue:
        self._issued += 1
        return Issue(what, unit, index)

    def _wait_for_last(self) -> Wait:
        return Wait(self._issued - 1)

    def _synchronize(self, index: int | None) -> Iterator[Action]:
        if self._synchronization:
            yield self._issue("synchronization", None, index)


class ShardedOptimizer(RankActions):
    """Gradients accumulate over the passes; the last pass with samples reduces them.

    Backward does not wait for reductions: gradients that are not sent yet stay in the accumulator.
    """

    limits_reductions = False

    def passes(self) -> Iterator[Action]:
        own = [index for index, has_samples in enumerate(self.has_samples) if has_samples]
        for index in own[:-1]:
            yield from self.compute(index, reduces=False)
        yield from self.compute(own[-1] if own else None)


class Replicated(ShardedOptimizer):
    """As stage 1, but each reduced slice is gathered during the next unit's reduction.

    A unit with nothing to train is neither reduced nor gathered.
    """

    def passes(self) -> Iterator[Action]:
        yield from super().passes()
        yield self._issue("all_gather_gradients", min(self._trained))

    def reduce(self, unit: int, index: int | None) -> Iterator[Action]:
        yield from super().reduce(unit, index)
        before = [other for other in self._trained if other > unit]
        if before and unit in self._trained:
            yield self._issue("all_gather_gradients", min(before), index)

    @property
    def _trained(self) -> list[int]:
        return [unit for unit in self.units if self._units.buffers[unit]]

    def all_gather_parameters(self) -> Iterator[Action]:
        yield from ()


class ShardedGradients(RankActions):
    """Every pass reduces. A rank starts its next pass as soon as its reductions allow."""

    def passes(self) -> Iterator[Action]:
        for index, has_samples in enumerate(self.has_samples):
            yield from self.compute(index if has_samples else None)


class ShardedParameters(RankActions):
    """Each unit is unsharded while the previous unit computes, in forward and backward.

    The last unit and resident units are still unsharded when their backward begins, so a pass
    unshards them once.
    """

    def passes(self) -> Iterator[Action]:
        for index in range(len(self.has_samples)):
            yield from self._pass(index)

    def _pass(self, index: int) -> Iterator[Action]:
        resident, computes = self._units.resident, self.has_samples[index]
        persistent = self._units.persistent
        again = [unit for unit in self.units if unit not in resident][-2::-1]
        left = deque((unit, index == 0 or unit not in persistent) for unit in self.units)
        left += [(unit, unit not in persistent) for unit in again]
        arriving: deque[int | None] = deque()

        def prefetch() -> Iterator[Action]:
            unit, is_sharded = left.popleft() if left else (None, False)
            if is_sharded:
                yield self._issue("unshard", unit, index)
                if not computes:  # the engine completes each unshard of such a pass at once
                    yield self._wait_for_last()
            arriving.append(self._issued - 1 if is_sharded else None)

        def unshard() -> Iterator[Action]:
            yield from prefetch()
            position = arriving.popleft()
            if position is not None:
                yield Wait(position)

        yield from prefetch()
        for unit in self.units:
            yield from unshard()
            if computes:
                yield Compute("forward", unit, index)
        for unit in reversed(self.units):
            if unit in again:
                yield from unshard()
            if computes:
                yield Compute("backward", unit, index)
            if unit not in resident:
                yield from self.reduce(unit, index)
        for unit in sorted(resident):
            yield from self.reduce(unit, index)
        yield from self._synchronize(index)

    def all_gather_parameters(self) -> Iterator[Action]:
        """Nothing: the next step unshards the updated parameters."""
        yield from ()


RANK_ACTIONS: tuple[type[RankActions], ...] = (
    Replicated,
    ShardedOptimizer,
    ShardedGradients,
    ShardedParameters,
)
"""By ZeRO stage."""
