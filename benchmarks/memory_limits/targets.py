"""Targets of the results, and whether rows reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verdict import CaseVerdict

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


def verdicts(rows: Sequence[LargestRow | PeakRow | RecomputationRow]) -> Iterator[CaseVerdict]:
    """All targets that apply to the rows."""
    peaks = [row for row in rows if isinstance(row, PeakRow)]
    for model in dict.fromkeys(row.model for row in peaks):
        errors = [row.error for row in peaks if row.model == model]
        what = "largest error of a predicted peak"
        worst = max(map(abs, errors))
        yield CaseVerdict(case=model, what=what, value=worst, wanted=ERROR, at_most=True)
        what = "largest part of a peak that was not predicted"
        under = max(0.0, -min(errors))
        yield CaseVerdict(case=model, what=what, value=under, wanted=UNDER, at_most=True)
    largest = [row for row in rows if isinstance(row, LargestRow)]
    for cluster in dict.fromkeys(row.cluster for row in largest):
        own = [row for row in largest if row.cluster == cluster]
        planned = [row.parameters for row in own if row.policy_is_planned]
        others = [row.parameters for row in own if row.parameters and not row.policy_is_planned]
        if cluster in OVER_EVEN and planned and others:
            what = "planned over the largest model of the even engines"
            value = planned[0] / max(others)
            yield CaseVerdict(case=cluster, what=what, value=value, wanted=OVER_EVEN[cluster])
    gains = {
        row.cluster: row.speed_up
        for row in rows
        if isinstance(row, RecomputationRow) and row.speed_up is not None
    }
    for cluster, gain in gains.items():
        what = "with recomputation over without it"
        yield CaseVerdict(case=cluster, what=what, value=gain, wanted=1 - NOISE)
    if gains:
        what = "largest gain by recomputation"
        yield CaseVerdict(
            case="all", what=what, value=max(gains.values()), wanted=RECOMPUTATION_GAIN
        )
