"""Targets of the results, and whether rows reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memory_limits.row import LargestRow, PeakRow, RecomputationRow

OVER_EVEN = {"8:4:2:2": 1.8, "8:1:1:1": 2.4}
"""Least parameters of the largest model over that of the best even engine, by cluster."""
ERROR = 0.05
"""Most by which a predicted peak differs from the measured one."""
UNDER = 0.02
"""Most by which a predicted peak is below the measured one."""

RECOMPUTATION_GAIN = 1.15
"""Least speed-up by recomputation on at least one cluster."""
NOISE = 0.03
"""A plan with recomputation may seem slower by this part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A measured value and its target."""

    case: str
    what: str
    value: float | None
    """None: not measured, which misses the target."""
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the value reaches the target."""
        if self.value is None:
            return False
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted

    @property
    def condition(self) -> str:
        """The target as text."""
        return f"{'<=' if self.at_most else '>='} {self.wanted:g}"


def verdicts(rows: Sequence[LargestRow | PeakRow | RecomputationRow]) -> Iterator[Verdict]:
    """All targets that apply to the rows."""
    peaks = [row for row in rows if isinstance(row, PeakRow)]
    for model in dict.fromkeys(row.model for row in peaks):
        errors = [row.error for row in peaks if row.model == model]
        what = "largest error of a predicted peak"
        worst = max(map(abs, errors))
        yield Verdict(case=model, what=what, value=worst, wanted=ERROR, at_most=True)
        what = "largest part of a peak that was not predicted"
        under = max(0.0, -min(errors))
        yield Verdict(case=model, what=what, value=under, wanted=UNDER, at_most=True)
    largest = [row for row in rows if isinstance(row, LargestRow)]
    for cluster in dict.fromkeys(row.cluster for row in largest):
        own = [row for row in largest if row.cluster == cluster]
        planned = [row.parameters for row in own if row.policy_is_planned]
        others = [row.parameters for row in own if row.parameters and not row.policy_is_planned]
        if cluster in OVER_EVEN and planned and others:
            what = "planned over the largest model of the even engines"
            value = planned[0] / max(others)
            yield Verdict(case=cluster, what=what, value=value, wanted=OVER_EVEN[cluster])
    gains = {
        row.cluster: row.speed_up
        for row in rows
        if isinstance(row, RecomputationRow) and row.speed_up is not None
    }
    for cluster, gain in gains.items():
        what = "with recomputation over without it"
        yield Verdict(case=cluster, what=what, value=gain, wanted=1 - NOISE)
    if gains:
        what = "largest gain by recomputation"
        yield Verdict(case="all", what=what, value=max(gains.values()), wanted=RECOMPUTATION_GAIN)
