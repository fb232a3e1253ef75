"""Fits the residuals of the cost model to measured steps, by stage and rank.

Plain passes do not include hooks, packing, or communication threads on the same cores; engine steps
do. The extra time of a rank's passes becomes its overhead, the remaining extra time of a step a
residual of its synchronizations and of the step. Noise makes the fit less accurate, but never makes
it fail.

[Note: overlap]
On devices that compute while they communicate, a step of a stage takes

    step = sum over synchronizations s of  (T[s] + c - hidden[s](overlap) + e)  +  tail + d

with the compute `T[s]`, the collectives `c` and the tail as measured alone, and the unknowns
`overlap` (one for all stages), `e` and `d` (residuals of each stage). Plans with the same passes,
but more of them, differ by `more * (T + c - hidden + e)`: the tail and `d` cancel, and what is left
shows `e - hidden`. No plan separates the two, so communication that costs less than its collectives
is explained by overlap, and only the rest by `e`: `overlap` is the least at which `e`, summed over
the stages with a synchronization per pass, is not negative. It shows only where a pass is long
enough to hide the collectives, so some calibration plans have such passes.

Then `e` and `d` follow at each stage with this overlap in the closed form. A residual that is
fitted without overlap contains `-hidden`, and a prediction with overlap would subtract that again.
So overlap is fitted before any residual, and from all stages at once. If only stages with one
synchronization per step were observed, `d` takes the place of `e`.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import starmap
from statistics import fmean, median, stdev

from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import StageCosts, costs_of, step_seconds_of
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import fits
from poplar.planner.search import search
from poplar.planner.what_if import with_slower_devices
from poplar.values.curve import DEVIATIONS
from poplar.values.observation import Observation, medians_by_plan
from poplar.values.plan import (
    FIRST_STAGE_SHARDING_PARAMETERS,
    FIRST_STAGE_SYNCHRONIZING_EVERY_PASS,
    Plan,
)
from poplar.values.profile import ClusterProfile, DeviceProfile

PASSES_OBSERVED = (1, 3)
"""Pass counts of the calibration plans. Their difference gives the cost of a synchronization."""
LARGEST_SLOWDOWN = 8.0
"""A device is not this much slower or faster from one minute to the next: beyond, it is noise."""
STEADY = 0.3
"""Relative change of a rank's plain passes, beyond their noise, below which its speed is steady.
A step has few passes: below this, their noise is larger than the error that it would remove."""
_OVERLAP_STEPS = 1 << 40
"""Resolution of the fitted overlap."""
_OVERLAP_ROUNDS = 4
"""Rounds of fitting the overlap and scaling the observations to the profiled speeds with it."""
_COVER = 1.25
"""Compute that can overlap, over the collectives, in passes that show the overlap."""
_ROUNDING = 1e-12


def plans_to_observe(
    cluster: ClusterProfile, stage: int, *, overlapped_seconds: float = 0.0
) -> list[Plan]:
    """One plan with few and one with more passes, the same on a rank; only those that fit.

    Passes take equally long on all ranks and shares are even where memory allows that. Otherwise
    passes, shares, recomputed units and state in host memory are those that a search finds.

    Args:
        cluster: measured, without residuals of this stage.
        overlapped_seconds: on devices that compute while they communicate, the longest pass that
            there is time for. Passes are then long enough to hide the collectives of their
            synchronization, if memory and this limit allow that.

    Raises:
        NoPlanFits: not even a few samples fit at this stage.
    """
    shortest = max(device.seconds(min(2, device.max_batch)) for device in cluster.devices)
    covering = min(overlapped_seconds, _covering_seconds(cluster, stage))
    for seconds in (max(shortest, covering), shortest):
        sizes = _sizes(cluster, seconds)
        plans = _repeated(cluster, Plan.manual(sizes, stage=stage))
        if len(plans) == len(PASSES_OBSERVED):
            return plans
    find = partial(search, cluster, stages=(stage,), leave_out="never")
    with suppress(NoPlanFits):  # passes after the first one need more memory
        samples = max(PASSES_OBSERVED) * sum(sizes)
        return _repeated(cluster, find(global_batch=samples, max_micro_batch=max(sizes)))
    return _repeated(cluster, find(global_batch=sum(sizes)))


def _repeated(cluster: ClusterProfile, plan: Plan) -> list[Plan]:
    """The plan with few and with more passes, all as large as a later one: those that fit."""
    sizes = [max(passes[1:] or passes, default=0) for passes in plan.micro_batches]
    recomputed = (unit for unit in plan.units if unit.recomputed_on)
    units = tuple(replace(unit, persistent=False) for unit in recomputed)
    plans = (
        replace(
            Plan.manual(sizes, stage=plan.stage, passes=passes, shares=plan.shares),
            transport=cluster.network.transport,
            units=units,
            host_state=plan.host_state,
        )
        for passes in PASSES_OBSERVED
    )
    return [each for each in plans if fits(cluster, each)]


def _covering_seconds(cluster: ClusterProfile, stage: int) -> float:
    """Seconds of a pass that hides the collectives of its synchronization, if overlap is full.

    At most the shortest of the ranks' longest passes, so that all ranks can take as long. 0 if
    nothing can overlap.
    """
    costs = StageCosts(replace(cluster, overlap=1.0), stage)
    if not costs.overlaps:
        return 0.0
    gather, reduce = costs.communication(cluster.even_shares)
    collectives = costs.schedule.gathers * gather + reduce
    longest = min(device.seconds(device.max_batch) for device in cluster.devices)
    return min(longest, _COVER * collectives / costs.reducible_fraction)


def _sizes(cluster: ClusterProfile, seconds: float) -> list[int]:
    """By rank, the largest batch whose pass takes at most so long; at least 1."""

    def largest(device: DeviceProfile) -> int:
        sizes = range(1, device.max_batch + 1)
        return max(1, bisect_right(sizes, seconds, key=device.seconds))

    return list(map(largest, cluster.devices))


def fit(
    cluster: ClusterProfile, turns: Iterable[Sequence[Observation]], *, asynchronous: bool
) -> ClusterProfile:
    """The profile with the residuals of the stages that ran.

    Args:
        cluster: measured, without residuals of these stages.
        turns: observations of the plans of `plans_to_observe`. Plans with different numbers of
            passes separate the residual of a synchronization from that of a step.
        asynchronous: the device computes while the host goes on. Then host timings of passes are
            not used, and the overlap is fitted: see [Note: overlap]. On a CPU collectives use the
            cores that compute, so what the profile does not know of overlap is noise.
    """
    raw = [seen for turn in turns for seen in turn]
    if not asynchronous:
        raw = [_with_speed_of_passes(cluster, seen) for seen in raw]
    cluster, raw = _at_usual_speeds(cluster, raw)
    if asynchronous and cluster.overlap == 0.0:
        cluster = replace(cluster, overlap=_fitted_overlap(cluster, raw))
    observations = medians_by_plan(at_profiled_speed(cluster, seen) for seen in raw)
    if not asynchronous:
        present = _with_overheads(cluster, observations)
        cluster = _with_shared_overheads(present, {seen.plan.stage for seen in observations})
        observations = tuple(_at_speed_of(cluster, seen, present) for seen in observations)
    by_stage = _by_stage(observations)
    for stage, own in by_stage.items():
        each = _synchronization_residual(cluster, own)
        cluster = _with_residuals(cluster, stage, own, synchronization=each)
    return replace(cluster, observed_stages=tuple(sorted(by_stage)))


def refine(
    cluster: ClusterProfile, observations: Sequence[Observation], *, asynchronous: bool
) -> ClusterProfile:
    """The profile at the speeds that the ranks had in these steps.

    A curve is measured once, but a device is a few percent faster or slower a minute later. So each
    rank's curve is scaled to its pass times. The rest goes into the residual of the step:
    predictions match the observations of each stage on average, and a single plan exactly.
    Plans that leave ranks out show speeds only: their collectives are those of fewer ranks.

    Args:
        cluster: measured, with the residuals of `fit`.
        asynchronous: as for `fit`; pass times are not used.
    """
    if not asynchronous:
        cluster = _at_observed_speeds(cluster, observations)
    by_stage = _by_stage(seen for seen in observations if not seen.plan.left_out)
    for stage, own in by_stage.items():
        each = cluster.network.synchronization_seconds[stage]
        cluster = _with_residuals(cluster, stage, own, synchronization=each)
    known = cluster.observed_stages and sorted({*cluster.observed_stages, *by_stage})
    return replace(cluster, observed_stages=tuple(known))


def noise_of_speeds(
    cluster: ClusterProfile, plan: Plan, observations: Sequence[Observation]
) -> float:
    """Relative standard deviation of a plan's step at the speeds that ranks had in these steps.

    Observations are compared with others of the same plan: between plans, the speeds of a rank also
    differ by the errors of its curve.

    Args:
        plan: whose step is predicted at the speeds of each observation.
        observations: of any plans; of each one, at least two show a difference.
    """
    by_plan: dict[Plan, list[float]] = {}
    for seen in observations:
        present = _at_observed_speeds(cluster, [seen])
        by_plan.setdefault(seen.plan, []).append(_active_seconds(present, plan))
    away = [step / fmean(own) - 1.0 for own in by_plan.values() for step in own]
    free = len(away) - len(by_plan)
    return math.sqrt(math.fsum(a * a for a in away) / free) if free else 0.0


def change_of_speeds(
    cluster: ClusterProfile, plan: Plan, observations: Sequence[Observation]
) -> float:
    """How much longer or shorter a plan's step is at the speeds that ranks had in these steps.

    The steps ran some time after the curves were measured, so the speeds may change as much again.
    What a curve is wrong by at these sizes is not told apart.

    Args:
        cluster: as measured, not at the speeds of the observations.
        plan: whose step is predicted.
        observations: of the plan.
    """
    present = _at_observed_speeds(cluster, observations)
    return abs(_active_seconds(present, plan) / _active_seconds(cluster, plan) - 1.0)


def _active_seconds(cluster: ClusterProfile, plan: Plan) -> float:
    """Seconds of a step of the plan's active ranks."""
    return step_seconds_of(*active_part(cluster, plan))


def at_profiled_speed(cluster: ClusterProfile, observation: Observation) -> Observation:
    """The observation that devices as fast as their profiled curves would have given.

    Without this, a device that is slower for a few seconds would be charged for it as engine
    overhead in every pass of every plan of that stage: 1.1 to 2.3 times the prediction error on
    simulated clusters. Unchanged if it has no slowdowns.
    """
    if not observation.slowdowns:
        return observation
    factors = [_plausible(factor) for factor in observation.slowdowns]
    seen = _at_speed_of(cluster, observation, with_slower_devices(cluster, factors))
    passes = (
        tuple(seconds / factor for seconds in own)
        for own, factor in zip(seen.pass_seconds, factors, strict=True)
    )
    return replace(seen, pass_seconds=tuple(passes), slowdowns=())


def _with_speed_of_passes(cluster: ClusterProfile, seen: Observation) -> Observation:
    """The observation; a rank whose speed changed meanwhile has the slowdown of its passes.

    The plain passes before and after such steps show neither speed, and a part of the step would
    become a residual, even a negative one: then many passes look better than few.
    """

    def slowdown(rank: int, between: float, change: float) -> float:
        device, passes = _device_of(cluster, seen, rank), _passes(seen, rank)
        if not passes or abs(change) <= STEADY + DEVIATIONS * device.noise:
            return between
        curve = math.fsum(device.seconds(size) for size, _ in passes)
        return math.fsum(took for _, took in passes) / curve

    known = zip(range(cluster.world_size), seen.slowdowns, seen.slowdown_changes, strict=False)
    return replace(seen, slowdowns=tuple(starmap(slowdown, known)) or seen.slowdowns)


def _at_usual_speeds(
    cluster: ClusterProfile, raw: Sequence[Observation]
) -> tuple[ClusterProfile, list[Observation]]:
    """The profile with each curve at the speed that its rank usually had, and the observations.

    A curve is measured once, maybe while another program ran. Slowdowns are of other moments. Their
    median, with that of the curve itself (1), is the usual speed, and how much they differ shows
    how much the rank's speed changes.
    """
    known = [seen.slowdowns for seen in raw if seen.slowdowns]
    if not known:
        return cluster, list(raw)
    by_rank = [[1.0, *map(_plausible, own)] for own in zip(*known, strict=True)]
    usual = list(map(median, by_rank))
    devices = (
        with_error(device, stdev(own) / middle)
        for device, own, middle in zip(
            with_slower_devices(cluster, usual).devices, by_rank, usual, strict=True
        )
    )
    seen = [
        replace(one, slowdowns=tuple(map(operator.truediv, one.slowdowns, usual)))
        if one.slowdowns
        else one
        for one in raw
    ]
    return replace(cluster, devices=tuple(devices)), seen


def with_error(device: DeviceProfile, error: float) -> DeviceProfile:
    """The device whose pass times have this relative error beside their own ones."""
    points = (
        replace(p, spread_seconds=math.hypot(p.spread_seconds, error * p.seconds))
        for p in device.points
    )
    return replace(device, points=tuple(points))


def _at_observed_speeds(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> ClusterProfile:
    """Scale the curve of each rank to its passes without their overheads."""

    def factor(rank: int, device: DeviceProfile) -> float:
        computed = profiled = 0.0
        for seen in observations:
            overhead = device.pass_overhead_seconds[seen.plan.stage]
            curve = _device_of(cluster, seen, rank).seconds
            for size, seconds in _passes(seen, rank):
                computed += seconds - overhead
                profiled += curve(size)
        return _plausible(computed / profiled) if profiled else 1.0

    factors = [factor(rank, device) for rank, device in enumerate(cluster.devices)]
    return with_slower_devices(cluster, factors)


def _device_of(cluster: ClusterProfile, seen: Observation, rank: int) -> DeviceProfile:
    """The rank's device, with the curves of the units that it recomputed."""
    if not seen.plan.recomputed_units(rank):
        return cluster.devices[rank]
    return costs_of(cluster, seen.plan).cluster.devices[rank]


def _plausible(slowdown: float) -> float:
    return min(max(slowdown, 1.0 / LARGEST_SLOWDOWN), LARGEST_SLOWDOWN)


def _at_speed_of(
    cluster: ClusterProfile, seen: Observation, present: ClusterProfile
) -> Observation:
    """The step of `seen`, which ran on `present` devices, as on those of `cluster`."""
    plan = seen.plan
    wanted, took = (step_seconds_of(each, plan) for each in (cluster, present))
    return replace(seen, step_seconds=seen.step_seconds * wanted / took)


def _with_overheads(cluster: ClusterProfile, observations: Sequence[Observation]) -> ClusterProfile:
    """Charge each stage with the time of its passes beyond the curves, and outside of passes."""

    def measured(rank: int, device: DeviceProfile) -> DeviceProfile:
        per_pass, per_step = list(device.pass_overhead_seconds), list(device.step_overhead_seconds)
        for stage, own in _by_stage(observations).items():
            beyond = [
                seconds - _device_of(cluster, seen, rank).seconds(size)
                for seen in own
                for size, seconds in _passes(seen, rank)
            ]
            if beyond:
                per_pass[stage] = max(0.0, median(beyond))
            per_step[stage] = median(seen.other_seconds[rank] for seen in own)
        return replace(
            device, pass_overhead_seconds=tuple(per_pass), step_overhead_seconds=tuple(per_step)
        )

    devices = (measured(rank, device) for rank, device in enumerate(cluster.devices))
    return replace(cluster, devices=tuple(devices))


def _with_shared_overheads(cluster: ClusterProfile, stages: Iterable[int]) -> ClusterProfile:
    """Give each rank one pass overhead for those of the stages that do not shard parameters.

    Passes of these stages differ only in where gradients are packed to. So the smallest overhead is
    used: the excess of another stage is a temporary slowdown. On simulated clusters, predictions
    without this have 1.03 to 2 times the error.
    """
    shared = {stage for stage in stages if stage < FIRST_STAGE_SHARDING_PARAMETERS}

    def with_least(device: DeviceProfile) -> DeviceProfile:
        own = device.pass_overhead_seconds
        least = min((own[stage] for stage in shared), default=0.0)
        overheads = (least if stage in shared else own[stage] for stage in range(len(own)))
        return replace(device, pass_overhead_seconds=tuple(overheads))

    return cluster.with_devices(with_least)


def _with_residuals(
    cluster: ClusterProfile,
    stage: int,
    observations: Iterable[Observation],
    *,
    synchronization: float,
) -> ClusterProfile:
    """With this residual of a synchronization, and what is left on average as that of the step."""

    def known(step: float) -> ClusterProfile:
        network = cluster.network.with_residuals(stage, synchronization=synchronization, step=step)
        return replace(cluster, network=network)

    synchronized = known(step=0.0)
    left = [_unexplained_seconds(synchronized, seen) for seen in observations]
    limits = [costs_of(synchronized, seen.plan).most_hidden_seconds for seen in observations]
    return known(step=_residual_with(left, limits))


def _residual_with(left: Sequence[float], limits: Sequence[float]) -> float:
    """The residual that explains these seconds on average, if it is cut off at minus the limits."""
    total, free = math.fsum(left), len(left)
    for limit in sorted(limits):
        if total >= -free * limit:
            break
        total, free = total + limit, free - 1  # this one is at its limit
    return total / free if free else -max(limits)


def _synchronization_residual(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> float:
    """Seconds per synchronization beyond the closed form; 0 if all plans have equally many."""
    few = min(observations, key=_synchronizations)
    many = max(observations, key=_synchronizations)
    more = _synchronizations(many) - _synchronizations(few)
    if not more:
        return 0.0
    extra = _unexplained_seconds(cluster, many) - _unexplained_seconds(cluster, few)
    return extra / more


def _unexplained_seconds(cluster: ClusterProfile, observation: Observation) -> float:
    """Observed step time minus the closed form without the residual of the step.

    A difference of predictions would not do: these never fall below the compute time, and they
    reject plans that do not fit.
    """
    plan = observation.plan
    costs = costs_of(cluster, plan)
    synchronized = costs.step_seconds(plan.micro_batches, plan.shares)
    synchronized -= costs.tail_seconds(plan.shares)
    update = max(map(costs.optimizer_seconds, range(plan.world_size), costs.owned(plan.shares)))
    gather = costs.gather_after_step_seconds(plan.shares)
    return observation.step_seconds - synchronized - update - gather


def _fitted_overlap(cluster: ClusterProfile, raw: Iterable[Observation]) -> float:
    """The overlap that the observations show: see [Note: overlap].

    What a step would have taken on devices at their profiled speeds depends on the overlap too.
    """
    overlap, raw = cluster.overlap, list(raw)
    for _ in range(_OVERLAP_ROUNDS):
        known = replace(cluster, overlap=overlap)
        overlap = _least_overlap(
            cluster, medians_by_plan(at_profiled_speed(known, seen) for seen in raw)
        )
    return overlap


def _least_overlap(cluster: ClusterProfile, observations: Sequence[Observation]) -> float:
    """The least overlap, at most 1, at which communication costs no less than its collectives.

    0 if overlap has no effect on these plans.
    """
    by_stage = _by_stage(observations)
    every_pass = [own for own in by_stage.values() if len(set(map(_synchronizations, own))) > 1]

    def missing(step: int) -> float:
        present = replace(cluster, overlap=step / _OVERLAP_STEPS)
        if every_pass:
            return sum(_synchronization_residual(present, own) for own in every_pass)
        return sum(_unexplained_seconds(present, seen) for seen in observations)

    if missing(_OVERLAP_STEPS) <= missing(0):
        return 0.0
    rounding = _ROUNDING * max(seen.step_seconds for seen in observations)
    return bisect_left(range(_OVERLAP_STEPS), -rounding, key=missing) / _OVERLAP_STEPS


def _passes(seen: Observation, rank: int) -> list[tuple[int, float]]:
    """Samples and seconds of each pass of a rank that had samples."""
    sizes = filter(None, seen.plan.micro_batches[rank])
    return list(zip(sizes, seen.pass_seconds[rank], strict=True))


def _synchronizations(observation: Observation) -> int:
    if observation.plan.stage < FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        return 1
    return max(map(len, observation.plan.micro_batches))


def _by_stage(observations: Iterable[Observation]) -> dict[int, list[Observation]]:
    by_stage: dict[int, list[Observation]] = {}
    for seen in observations:
        by_stage.setdefault(seen.plan.stage, []).append(seen)
    return by_stage
