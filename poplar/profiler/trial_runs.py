"""Plans that run in turns, and what the turns say of them.

A device is a few percent faster or slower from one minute to the next, which is more than good
plans differ by. So two plans are compared over the turns that both ran, each of which met the same
luck, and what a plan is known by is the median over all of its turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from poplar.plan import Plan
from poplar.profiler.engine_steps import Observation
from poplar.profiler.passes import error_of_median


class Trials:
    """What has been observed of any number of plans. Arithmetic only; nothing runs here."""

    def __init__(self) -> None:
        self._turns: list[dict[Plan, Observation]] = []

    def add(self, turn: Sequence[Observation]) -> None:
        """One more turn: each plan that took part in it, once."""
        self._turns.append({observation.plan: observation for observation in turn})

    def turns(self, plan: Plan) -> int:
        """How often a plan ran."""
        return sum(plan in turn for turn in self._turns)

    def observations(self) -> tuple[Observation, ...]:
        """One for each plan, in the order in which they came: medians over its turns."""
        plans = dict.fromkeys(plan for turn in self._turns for plan in turn)
        return tuple(
            _pooled([turn[plan] for turn in self._turns if plan in turn]) for plan in plans
        )

    def ratio(self, plan: Plan, other: Plan) -> float:
        """A step of `plan` over one of `other`, the median of the turns that both ran."""
        return median(
            turn[plan].step_seconds / turn[other].step_seconds
            for turn in self._turns
            if plan in turn and other in turn
        )

    def ranking(self, plans: Sequence[Plan]) -> list[Plan]:
        """The fastest first, of at least one plan; any two of them have run together."""
        fastest = plans[0]
        for plan in plans[1:]:
            if self.ratio(plan, fastest) < 1.0:
                fastest = plan
        return sorted(plans, key=lambda plan: (plan != fastest, self.ratio(plan, fastest)))


def _pooled(observations: Sequence[Observation]) -> Observation:
    """Of one plan, over its turns."""
    turns = [seen.step_seconds for seen in observations]
    return Observation(
        plan=observations[0].plan,
        step_seconds=median(turns),
        spread_seconds=_larger_error([seen.spread_seconds for seen in observations], turns),
        pass_seconds=tuple(
            tuple(median(times) for times in zip(*own, strict=True))
            for own in zip(*(seen.pass_seconds for seen in observations), strict=True)
        ),
        other_seconds=tuple(
            median(own) for own in zip(*(seen.other_seconds for seen in observations), strict=True)
        ),
        pass_errors=tuple(
            _larger_error(own, [fmean(seen.pass_seconds[rank] or [0.0]) for seen in observations])
            for rank, own in enumerate(zip(*(o.pass_errors for o in observations), strict=True))
        ),
    )


def _larger_error(errors: Sequence[float], turns: Sequence[float]) -> float:
    """The standard error of the median over turns: by their own errors, or by how they differ."""
    return max(median(errors) / math.sqrt(len(turns)), error_of_median(turns))
