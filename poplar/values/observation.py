"""Measured steps of plans, as values.

An `Observation` is what one plan took on the engine. `Trials` collects the observations of several
plans over turns and compares two plans only over the turns that both took part in, because a device
is often a few percent faster or slower from one minute to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from poplar.values.curve import DEVIATIONS, deviation, error_of_median
from poplar.values.plan import Plan

_OF_ONE_TURN = 0.1
"""Relative standard deviation of a step time that is assumed of a single turn: another program may
have run all the while."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measured steps of one plan: medians over the steps, the same value on every rank."""

    plan: Plan
    step_seconds: float
    """Wall time of a step, averaged over ranks."""
    pass_seconds: tuple[tuple[float, ...], ...]
    """`[rank][pass]`, passes with samples only, without the time spent waiting for other ranks."""
    other_seconds: tuple[float, ...]
    """Time of each rank outside passes and optimizer update, without waiting."""
    slowdowns: tuple[float, ...] = ()
    """Time of plain passes of each rank right before and after the steps, relative to the profiled
    curve; empty if unknown."""
    slowdown_changes: tuple[float, ...] = ()
    """How much longer these passes of each rank took after the steps than before, relative."""


class Trials:
    """Observations of any number of plans, one dictionary per turn."""

    def __init__(self, noise: float = 0.0) -> None:
        """`noise`: relative standard deviation of a step time, as far as it is known before."""
        self._noise = noise
        self._turns: list[dict[Plan, Observation]] = []

    def add(self, turn: Sequence[Observation]) -> None:
        """Add one turn, in which each plan ran at most once."""
        self._turns.append({observation.plan: observation for observation in turn})

    def turns(self, plan: Plan) -> int:
        """Number of turns in which the plan ran."""
        return sum(plan in turn for turn in self._turns)

    def ran_last(self, plan: Plan) -> bool:
        """Whether the plan ran in the latest turn."""
        return plan in self._turns[-1]

    def each(self) -> list[Observation]:
        """The observations of all turns."""
        return [seen for turn in self._turns for seen in turn.values()]

    def observations(self) -> tuple[Observation, ...]:
        """See `medians_by_plan`."""
        return medians_by_plan(self.each())

    def ratio(self, plan: Plan, other: Plan) -> float:
        """Step time of `plan` over that of `other`: the median of the turns that both ran in."""
        return median(self._ratios(plan, other))

    def _ratios(self, plan: Plan, other: Plan) -> list[float]:
        return [
            turn[plan].step_seconds / turn[other].step_seconds
            for turn in self._turns
            if plan in turn and other in turn
        ]

    def is_slower(self, plan: Plan, other: Plan, *, by: float = 0.0) -> bool:
        """Whether `plan` is slower by more than this fraction, beyond chance."""
        ratios = self._ratios(plan, other)
        noise = max(self._usual_noise(), 0.0 if len(ratios) > 1 else _OF_ONE_TURN)
        doubt = DEVIATIONS * error_of_median(ratios, math.sqrt(2.0) * noise)
        return median(ratios) * (1.0 - doubt) > 1.0 + by

    def noise(self, plan: Plan) -> float:
        """Relative standard deviation of the step times of a plan over turns; see `deviation`."""
        return deviation(self._seconds(plan), self._usual_noise())

    def error(self, plan: Plan) -> float:
        """Relative standard error of the step time of a plan."""
        return error_of_median(self._seconds(plan), self._usual_noise())

    def _usual_noise(self) -> float:
        """That of all plans, and that known before."""
        times = [self._seconds(plan) for plan in {plan for turn in self._turns for plan in turn}]
        return median([self._noise, *(deviation(own) for own in times if len(own) > 1)])

    def _seconds(self, plan: Plan) -> list[float]:
        return [turn[plan].step_seconds for turn in self._turns if plan in turn]

    def ranking(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans, fastest first. Any two of them must have shared a turn."""
        return sorted(plans, key=lambda plan: self.ratio(plan, plans[0]))


def medians_by_plan(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """One observation per plan, in order of first appearance: medians over the turns it ran in."""
    by_plan: dict[Plan, list[Observation]] = {}
    for seen in observations:
        by_plan.setdefault(seen.plan, []).append(seen)
    return tuple(map(_medians, by_plan.values()))


def _medians(observations: Sequence[Observation]) -> Observation:
    """The medians over the turns of one plan."""
    return Observation(
        plan=observations[0].plan,
        step_seconds=median(seen.step_seconds for seen in observations),
        pass_seconds=tuple(
            tuple(map(median, zip(*own, strict=True)))
            for own in zip(*(seen.pass_seconds for seen in observations), strict=True)
        ),
        other_seconds=tuple(
            map(median, zip(*(seen.other_seconds for seen in observations), strict=True))
        ),
    )
