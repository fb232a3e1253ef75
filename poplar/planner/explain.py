"""What bounds a plan, what would make it faster, and what each group of devices adds.

Every answer is a new search on a changed cluster (`what_if`), so batches and shares change as well.
Devices of one group (`device_groups`) change together: the number of searches grows with the
groups, not with the ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from poplar.formatting import format_ranks, format_signed_percent
from poplar.plan import Plan
from poplar.planner import what_if
from poplar.planner.cost_model import costs_of
from poplar.planner.device_groups import device_groups, with_equal_devices
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import Bound, DoesNotFit, bound_of, predict
from poplar.planner.search import ALL_STAGES
from poplar.planner.simple_plans import PREFERENCE
from poplar.planner.what_if import Change, Changed, Scenario, evaluate
from poplar.profile import ClusterProfile

PREDICTION_ERROR = 0.04
"""Default error of a predicted step, as a fraction; see the benchmark of predictions."""
NOISE = PREFERENCE
"""Smaller gains are not reported: a search may return a plan that is slower by as much."""
WORTH_IT, NOT_WORTH_IT, NEEDED = "worth it", "not worth it", "needed"

_SCHEMA_VERSION = 1
_MORE_MEMORY, _FASTER_DEVICE = 0.25, 1.25
_SHORTEST_STEP = 1e-12
_GAP = 4
"""Measured batches more than this factor apart leave a gap in the profile; twice is usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What some ranks add, by the fastest plan of the same global batch without them."""

    ranks: tuple[int, ...]
    device: str
    without: float | None
    """Fraction by which samples per second change without these ranks; None: no plan fits then."""
    verdict: str
    """`"worth it"`; `"not worth it"`: they add no more than the error, or less than nothing;
    `"needed"`: without them no plan fits."""

    def __str__(self) -> str:
        gain = "" if self.without is None else format_signed_percent(self.without)
        return ": ".join(filter(None, (f"without {format_ranks(self.ranks)}", gain, self.advice)))

    @property
    def advice(self) -> str:
        """What to do; empty: nothing."""
        if self.without is None:
            return "no plan fits"
        if self.verdict == WORTH_IT:
            return ""
        if self.without > 0.0:
            return "leave it out" if len(self.ranks) == 1 else "leave them out"
        return f"{NOT_WORTH_IT}, within the error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why a plan takes as long as it does, what would change that, and what planning gains."""

    step_seconds: float
    """Predicted for the plan."""
    error: float
    """Relative error of a predicted step; smaller gains are not worth it."""
    bound: Bound
    """What limits the step, with the rank whose compute, link or memory it is."""
    faster_plan: float
    """Fraction by which the fastest plan found is faster than this one; 0: none is faster."""
    over_even: float | None
    """Fraction by which this plan is faster than the best plan of policy "even", which gives every
    rank the same; None: no even plan fits."""
    verdict: str
    """Whether planning is `"worth it"`, `"not worth it"` or, if no even plan fits, `"needed"`."""
    changes: tuple[Change, ...]
    """What would help, largest gain first, without gains that are within the noise."""
    contributions: tuple[Contribution, ...]
    """One per group of devices, least valuable first; empty for a single rank."""
    doubts: tuple[str, ...] = ()
    """Where the plan relies on pass times that were not measured."""

    def sentences(self) -> list[str]:
        """What concerns the whole plan, as text."""
        sentences = [f"bound by {self.bound.sentence}"]
        if self.faster_plan > 0.0:
            sentences.append(f"another plan gives {format_signed_percent(self.faster_plan)}")
        gain = "no even plan fits"
        if self.over_even is not None:
            error = f"error ±{100 * self.error:.3g} %"
            gain = f"{format_signed_percent(self.over_even)}, {error}: {self.verdict}"
        return [
            *sentences,
            f"over an even plan: {gain}",
            *(f"uncertain: {doubt}" for doubt in self.doubts),
        ]

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *map(str, (*self.changes, *self.contributions))])

    def to_dict(self) -> dict[str, Any]:
        """This explanation as JSON types."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"version": _SCHEMA_VERSION, **content}


def explain(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] = ALL_STAGES,
    max_micro_batch: int | None = None,
    error: float = PREDICTION_ERROR,
) -> Explanation:
    """Find what bounds a plan, what would help most, and what each group of devices adds.

    Args:
        cluster: what was measured.
        plan: for this cluster. Other plans are searched for the same global batch.
        stages: ZeRO stages that other plans may have.
        max_micro_batch: most samples of one pass in other plans; None: what was measured.
        error: relative error of a predicted step, from 0 to below 1. Smaller gains are not worth
            it.

    Raises:
        DoesNotFit: the plan needs more memory than there is, or batches that were not measured.
        ValueError: a plan for another cluster, or arguments out of range.
    """
    if not (math.isfinite(error) and 0.0 <= error < 1.0):
        raise ValueError(f"error must be a fraction of a step from 0 to below 1, got {error}")
    prediction = predict(cluster, plan)
    step = prediction.step_seconds
    measured = Scenario(
        cluster=cluster,
        global_batch=plan.global_batch,
        stages=stages,
        max_micro_batch=max_micro_batch,
    )
    even = _fastest_plan(replace(measured, policy="even"))
    over_even = None if even is None else _gain(_step_seconds(even), step)
    exposed = prediction.communication_seconds / max(step, _SHORTEST_STEP)
    searches = _Searches(measured, plan, step)
    return Explanation(
        step_seconds=step,
        error=error,
        bound=bound_of(costs_of(cluster, plan), plan, prediction.busy_fraction, exposed),
        faster_plan=searches.faster_plan,
        over_even=over_even,
        verdict=NEEDED if over_even is None else _verdict(over_even, error),
        changes=tuple(sorted(searches.changes(), key=lambda one: -one.gain)),
        contributions=tuple(sorted(searches.contributions(error), key=_least_valuable_first)),
        doubts=tuple(_gaps_in_the_profile(cluster, plan)),
    )


class _Searches:
    """Searches for the same global batch on one changed cluster after another."""

    def __init__(self, scenario: Scenario, plan: Plan, step: float) -> None:
        self._groups = device_groups(scenario.cluster)
        equal = with_equal_devices(scenario.cluster, self._groups)
        with suppress(DoesNotFit):
            step = predict(equal, plan).step_seconds
        self._scenario = scenario = replace(scenario, cluster=equal)
        self._fastest, self._noise = step, NOISE
        best = _fastest_plan(scenario)
        if best is not None:
            self._fastest = min(step, _step_seconds(best))
            self._noise = max(NOISE, (best.prediction or {})["optimality_gap"] or 0.0)
        gain = _gain(step, self._fastest)
        self.faster_plan = gain if gain > self._noise else 0.0

    def changes(self) -> Iterator[Change]:
        """Changes with gains above the noise."""
        scenario, step = self._scenario, self._fastest
        cluster, network = scenario.cluster, scenario.cluster.network
        tried = [what_if.faster_devices(scenario, one, _FASTER_DEVICE) for one in self._groups]
        if network.reduce_scatter_seconds + network.all_gather_seconds > 0.0:
            tried += [what_if.faster_network(scenario), what_if.full_overlap(scenario)]
        gains = [_with_gain(changed, step) for changed in tried]
        limit = min(scenario.max_micro_batch or scenario.global_batch, scenario.global_batch)
        if any(device.max_batch < limit for device in cluster.devices):
            # More memory helps where larger batches than measured ones may fit.
            larger = what_if.larger_batches(scenario)
            gains.append(_with_gain(larger, step))
            scenario, step = larger.scenario, step / (1.0 + max(0.0, gains[-1].gain))
        for group in self._groups:
            memory = cluster.devices[group.ranks[0]].memory_bytes
            added = max(1, round(_MORE_MEMORY * memory / 2**20))
            gains.append(_with_gain(what_if.more_memory(scenario, group, added), step))
        return (change for change in gains if change.gain > self._noise)

    def contributions(self, error: float) -> Iterator[Contribution]:
        """What each group adds; if all ranks are in one group, what one rank adds."""
        if self._scenario.cluster.world_size == 1:
            return
        for group in self._groups:
            ranks = group.ranks if len(self._groups) > 1 else group.ranks[-1:]
            plan = _fastest_plan(what_if.without(self._scenario, ranks).scenario)
            gain = None if plan is None else _gain(self._fastest, _step_seconds(plan))
            verdict = NEEDED if gain is None else _verdict(-gain, error)
            yield Contribution(ranks=ranks, device=group.device, without=gain, verdict=verdict)


def _with_gain(changed: Changed, before: float) -> Change:
    plan = _fastest_plan(changed.scenario)
    if plan is None:
        return changed.change
    return replace(changed.change, gain=_gain(before, _step_seconds(plan)), stage=plan.stage)


def _fastest_plan(scenario: Scenario) -> Plan | None:
    """None: no plan fits. Raises the errors of `search` about arguments."""
    found = evaluate(scenario)
    if isinstance(found, Plan):
        return found
    if isinstance(found, NoPlanFits):
        return None
    raise found


def _step_seconds(plan: Plan) -> float:
    return float((plan.prediction or {})["step_seconds"])


def _gain(before: float, after: float) -> float:
    """By which fraction samples per second grow if a step takes `after` instead of `before`."""
    return before / max(after, _SHORTEST_STEP) - 1.0


def _verdict(gain: float, error: float) -> str:
    return WORTH_IT if gain > error else NOT_WORTH_IT


def _least_valuable_first(contribution: Contribution) -> float:
    return math.inf if contribution.without is None else -contribution.without


def _gaps_in_the_profile(cluster: ClusterProfile, plan: Plan) -> Iterator[str]:
    """One sentence per device name and gap for batches of the plan that are far from measured."""
    reported = set()
    for rank, passes in enumerate(plan.micro_batches):
        device = cluster.devices[rank]
        measured = [0, *(point.batch for point in device.points)]
        for batch in sorted(set(passes).difference(measured)):
            below = max(other for other in measured if other < batch)
            above = min((other for other in measured if other > batch), default=0)
            if above > _GAP * max(1, below) and (device.name, below, above) not in reported:
                reported.add((device.name, below, above))
                yield (
                    f"rank {rank} ({device.name}) runs {batch} samples, but nothing was measured "
                    f"between {below} and {above}"
                )
