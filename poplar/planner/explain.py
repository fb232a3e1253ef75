"""What bounds a plan, what would make it faster, and what each group of devices adds.

Every answer is a new search on a changed cluster (`what_if`). Devices of one group
(`device_groups`) change together, so there are few searches.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from poplar.planner import what_if
from poplar.planner.active_ranks import active_part, without_ranks
from poplar.planner.cost_model import costs_of
from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
from poplar.planner.prediction import (
    Bound,
    Prediction,
    bound_of,
    predict,
    predicted_seconds,
    unmeasured_batches,
)
from poplar.planner.search import search
from poplar.planner.simple_plans import PREFERENCE
from poplar.planner.stage_search import TooManyPasses
from poplar.planner.what_if import Change, Changed, DeviceGroup, device_groups, with_equal_devices
from poplar.values.communication import EXACT, Communication
from poplar.values.formatting import (
    NOISY,
    format_bytes,
    format_percent,
    format_ranks,
    format_signed_percent,
)
from poplar.values.plan import ALL_STAGES, Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import to_json_types

NOISE = PREFERENCE
"""Smaller gains are not reported: a search may return a plan that is slower by as much."""
WORTH_IT, NOT_WORTH_IT, NEEDED = "worth it", "not worth it", "needed"

_SCHEMA_VERSION = 2
_MORE_MEMORY, _FASTER_DEVICE = 0.25, 1.25
_MOST_DOUBLINGS = 8
"""Of the speed of a link or a device that is left out."""
_SHORTEST_STEP = 1e-12
_GAP = 4
"""Measured batches more than this factor apart leave a gap in the profile; twice is usual."""
_FastestPlan = Callable[[ClusterProfile], Plan | None]
"""The fastest plan for the same request on another cluster; None: no plan fits, or not in the
passes that a plan may list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What some ranks add, by the fastest plan of the same global batch without them."""

    ranks: tuple[int, ...]
    device: str
    without: float | None
    """Fraction by which samples per second change without these ranks; None: no plan fits then,
    or not in as many passes as a plan may list."""
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
            it = "it" if len(self.ranks) == 1 else "them"
            return f'leave {it} out with leave_out="auto"'
        return f"{NOT_WORTH_IT}, within the error"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Why a plan leaves ranks out, and what would change that."""

    ranks: tuple[int, ...]
    device: str
    with_them: float | None
    """Fraction by which samples per second change with these ranks; None: no plan fits then."""
    bound: str
    """What bounds the step with them, as a sentence; empty if no plan fits."""
    remedies: tuple[Change, ...]
    """The smallest changes of their links or devices tried with which a plan uses them."""

    def __str__(self) -> str:
        one = len(self.ranks) == 1
        text = (
            f"{format_ranks(self.ranks)} ({self.device}) {'is' if one else 'are'} left out: with "
        )
        text += "it" if one else "them"
        if self.with_them is None:
            return f"{text} no plan fits"
        text += f" {format_signed_percent(self.with_them)}, bound by {self.bound}"
        remedies = " or ".join(f"{change.what}s {change.amount}" for change in self.remedies)
        return text + (f"; worth it with {remedies}" if remedies else "")


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
    uncertainties: tuple[str, ...] = ()
    """What the search left open, and where the plan relies on pass times that were not measured.
    Also the stages of which no plan was compared, because the profile has no step of them."""
    left_out: tuple[LeftOut, ...] = ()
    """One per group of devices that the plan leaves out."""
    communication: Communication = EXACT
    """Of the plan. If it compresses, the gradient is not exact."""

    def sentences(self) -> list[str]:
        """What concerns the whole plan, as text."""
        sentences = [f"bound by {self.bound.sentence}"]
        if self.faster_plan > 0.0:
            sentences.append(f"another plan gives {format_signed_percent(self.faster_plan)}")
        gain = "no even plan fits"
        if self.over_even is not None:
            error = f"error ±{100 * self.error:.2g} %{', noisy' if self.error > NOISY else ''}"
            gain = f"{format_signed_percent(self.over_even)}, {error}: {self.verdict}"
        if self.communication.compresses:
            sentences.append(str(self.communication))
        return [
            *sentences,
            *map(str, self.left_out),
            f"over an even plan: {gain}",
            *(f"uncertain: {one}" for one in self.uncertainties),
        ]

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *map(str, (*self.changes, *self.contributions))])

    def to_dict(self) -> dict[str, Any]:
        """This explanation as JSON types."""
        return {"version": _SCHEMA_VERSION, **to_json_types(self)}


def explain(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] | None = None,
    max_micro_batch: int | None = None,
    error: float | None = None,
    **choices: Any,
) -> Explanation:
    """Find what bounds a plan, what would help most, and what each group of devices adds.

    Args:
        cluster: what was measured.
        plan: for this cluster. Other plans are searched for the same global batch.
        stages: ZeRO stages that other plans may have, as for `search`. None: those that were
            profiled, so more memory or a faster network never shows a gain at another stage.
        max_micro_batch: most samples of one pass in other plans; None: what was measured.
        error: relative error of a predicted step, at least 0. Smaller gains are not worth it. None:
            half of the interval of the plan's step.
        choices: `recompute`, `factored` and `host_state` of other plans, as for `search`. They
            communicate as this one, as far as their stages can, and leave out no other ranks.

    Raises:
        DoesNotFit: the plan needs more memory than there is, or batches that were not measured.
        ValueError: a plan for another cluster, or arguments out of range.
    """
    if error is not None and not (math.isfinite(error) and error >= 0.0):
        raise ValueError(f"error must be a fraction of a step of at least 0, got {error}")

    def fastest(changed: ClusterProfile, policy: str = "exact") -> Plan | None:
        with suppress(NoPlanFits, TooManyPasses):
            return search(
                changed,
                global_batch=plan.global_batch,
                stages=stages,
                policy=policy,
                max_micro_batch=max_micro_batch,
                **{**choices, "communication": plan.communication, "leave_out": "never"},
            )
        return None

    prediction = predict(cluster, plan)
    error = prediction.error if error is None else error
    even = fastest(cluster, policy="even")
    over_even = None if even is None else _gain(predicted_seconds(even), prediction.step_seconds)
    left_out = tuple(_reasons(cluster, plan, fastest))
    numbers, gap = plan.active_ranks, (plan.prediction or {}).get("optimality_gap") or 0.0
    cluster, plan = active_part(cluster, plan)
    own = predict(cluster, plan)
    groups = device_groups(cluster)
    equal = with_equal_devices(cluster, groups)
    step, noise = prediction.step_seconds, NOISE
    with suppress(DoesNotFit):
        step = predict(equal, plan).step_seconds
    least, best = step, fastest(equal)
    if best is not None:
        least = min(step, predicted_seconds(best))
        noise = max(NOISE, (best.prediction or {})["optimality_gap"] or 0.0)
    changes = [one for one in _changes(equal, groups, least, fastest) if one.gain > noise]
    contributions = _contributions(equal, groups, least, fastest, error)

    def least_valuable_first(one: Contribution) -> float:
        return math.inf if one.without is None else -one.without

    def numbered(one: Any) -> Any:
        return replace(one, ranks=tuple(numbers[rank] for rank in one.ranks))

    return Explanation(
        step_seconds=prediction.step_seconds,
        error=error,
        bound=bound_of(costs_of(cluster, plan), plan, own, numbers),
        faster_plan=gain if (gain := _gain(step, least)) > noise else 0.0,
        over_even=over_even,
        verdict=_verdict(over_even, error),
        changes=tuple(map(numbered, sorted(changes, key=lambda one: -one.gain))),
        contributions=tuple(map(numbered, sorted(contributions, key=least_valuable_first))),
        uncertainties=(
            *_left_open(cluster, plan.stage, own, gap, numbers),
            *_gaps_in_the_profile(cluster, plan, numbers),
            *(_stages_not_compared(cluster) if stages is None else ()),
        ),
        left_out=left_out,
        communication=plan.communication,
    )


def _reasons(cluster: ClusterProfile, plan: Plan, fastest: _FastestPlan) -> Iterator[LeftOut]:
    """For each group of ranks that the plan leaves out, the fastest plan that has them, too."""
    least = predict(cluster, plan).step_seconds
    for group in device_groups(cluster):
        ranks = tuple(rank for rank in group.ranks if rank in plan.left_out)
        if not ranks:
            continue
        others = tuple(rank for rank in plan.left_out if rank not in ranks)
        left = [rank for rank in range(cluster.world_size) if rank not in others]
        own = DeviceGroup(group.device, tuple(map(left.index, ranks)))
        beside = without_ranks(cluster, others)
        found = fastest(beside)
        yield LeftOut(
            ranks=ranks,
            device=group.device,
            with_them=None if found is None else _gain(least, predicted_seconds(found)),
            bound="" if found is None else predict(cluster, found.beside(others)).bound,
            remedies=tuple(
                replace(change, ranks=ranks)
                for changed in (what_if.faster_links, what_if.faster_devices)
                for change in _smallest_factor(partial(changed, beside, own), least, fastest)
            ),
        )


def _smallest_factor(
    changed: Callable[[float], Changed], least: float, fastest: _FastestPlan
) -> Iterator[Change]:
    """The change by the smallest power of 2 that makes a step shorter than `least`; or nothing."""
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        change = _with_gain(changed(2.0**doublings), least, fastest)
        if change.gain > NOISE:
            yield change
            return


def _changes(
    cluster: ClusterProfile, groups: Sequence[DeviceGroup], step: float, fastest: _FastestPlan
) -> Iterator[Change]:
    """What may help, with its gain over this step."""
    for group in groups:
        yield _with_gain(what_if.faster_devices(cluster, group, _FASTER_DEVICE), step, fastest)
    if cluster.network.reduce_scatter_seconds + cluster.network.all_gather_seconds > 0.0:
        yield _with_gain(what_if.faster_network(cluster), step, fastest)
        yield _with_gain(what_if.full_overlap(cluster), step, fastest)
    larger = what_if.larger_batches(cluster)
    larger_batches = _with_gain(larger, step, fastest)
    yield larger_batches
    step /= 1.0 + max(0.0, larger_batches.gain)
    for group in groups:  # more memory helps where larger batches than measured ones may fit
        memory = cluster.devices[group.ranks[0]].memory_bytes
        added = max(1, round(_MORE_MEMORY * memory / 2**20))
        yield _with_gain(what_if.more_memory(larger.cluster, group, added), step, fastest)


def _with_gain(changed: Changed, step: float, fastest: _FastestPlan) -> Change:
    plan = fastest(changed.cluster)
    if plan is None:
        return changed.change
    return replace(changed.change, gain=_gain(step, predicted_seconds(plan)), stage=plan.stage)


def _contributions(
    cluster: ClusterProfile,
    groups: Sequence[DeviceGroup],
    step: float,
    fastest: _FastestPlan,
    error: float,
) -> Iterator[Contribution]:
    """What each group adds; if all ranks are in one group, what one rank adds."""
    if cluster.world_size == 1:
        return
    for group in groups:
        ranks = group.ranks if len(groups) > 1 else group.ranks[-1:]
        plan = fastest(what_if.without(cluster, ranks).cluster)
        gain = None if plan is None else _gain(step, predicted_seconds(plan))
        verdict = _verdict(None if gain is None else -gain, error)
        yield Contribution(ranks=ranks, device=group.device, without=gain, verdict=verdict)


def _gain(before: float, after: float) -> float:
    """By which fraction samples per second grow if a step takes `after` instead of `before`."""
    return before / max(after, _SHORTEST_STEP) - 1.0


def _verdict(gain: float | None, error: float) -> str:
    if gain is None:
        return NEEDED
    return WORTH_IT if gain > error else NOT_WORTH_IT


def _left_open(
    cluster: ClusterProfile, stage: int, prediction: Prediction, gap: float, numbers: Sequence[int]
) -> Iterator[str]:
    """What made the search hard, if it ended before it was close to a proof."""
    if gap <= NOISE:
        return
    limits = [device.memory_bytes * (1.0 - cluster.memory_reserve) for device in cluster.devices]
    used = list(map(operator.truediv, prediction.memory_bytes, limits))
    rank = used.index(max(used))
    yield (
        f"the search ended before it could rule out a plan of stage {stage} that is up to "
        f"{format_percent(gap)} faster: samples and state compete for memory, most of all on rank "
        f"{numbers[rank]} ({cluster.devices[rank].name}), which needs "
        f"{format_bytes(prediction.memory_bytes[rank])} of {format_bytes(limits[rank])}"
    )


def _stages_not_compared(cluster: ClusterProfile) -> Iterator[str]:
    """One sentence if a search without `stages` looks for plans of some stages only."""
    known = {*cluster.observed_stages, *cluster.failed_stages}
    others = [stage for stage in ALL_STAGES if stage not in known]
    if cluster.observed_stages and others:
        yield (
            f"no plan of stage {' or '.join(map(str, others))} was compared, with any change, "
            "because no step of it was profiled; to compare predictions, give the stages"
        )


def _gaps_in_the_profile(
    cluster: ClusterProfile, plan: Plan, numbers: Sequence[int]
) -> Iterable[str]:
    """One sentence per device name and gap for batches of the plan that are far from measured."""
    sentences: dict[tuple[str, int, int], str] = {}
    for rank, batches in enumerate(unmeasured_batches(cluster, plan)):
        device = cluster.devices[rank]
        measured = [0, *(point.batch for point in device.points)]
        for batch in batches:
            above = bisect(measured, batch)
            low, high = measured[above - 1], measured[above]
            if high > _GAP * max(1, low):
                sentence = (
                    f"rank {numbers[rank]} ({device.name}) runs {batch} samples, but nothing was "
                    f"measured between {low} and {high}"
                )
                sentences.setdefault((device.name, low, high), sentence)
    return sentences.values()
