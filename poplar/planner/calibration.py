"""Fits the residuals of the cost model to measured steps, by stage and rank.

Plain passes do not include hooks, packing, or communication threads on the same cores; engine steps
do. The extra time of a rank's passes becomes its overhead, the remaining extra time of a step a
residual of its synchronizations and of the step. Noise makes the fit less accurate, but never makes
it fail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean, median

from poplar.observation import Observation, pooled
from poplar.plan import FIRST_STAGE_SHARDING_PARAMETERS, FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, Plan
from poplar.planner.cost_model import costs_of
from poplar.planner.prediction import fits
from poplar.planner.search import search
from poplar.planner.what_if import with_slower_devices
from poplar.profile import ClusterProfile, DeviceProfile

PASSES_OBSERVED = (1, 3)
"""Pass counts of the calibration plans. Their difference gives the cost of a synchronization."""
LARGEST_SLOWDOWN = 8.0
"""A device is not this much slower or faster from one minute to the next: beyond, it is noise."""
_OVERLAP_STEPS = 1 << 40
"""Resolution of the fitted overlap."""


def plans_to_observe(cluster: ClusterProfile, stage: int) -> list[Plan]:
    """One plan with few and one with more passes, the same on a rank.

    Passes take equally long on all ranks and shares are even where memory allows that. Otherwise
    both are those that a search finds.

    Raises:
        NoPlanFits: not even a few samples fit at this stage.
    """
    target = max(device.seconds(min(2, device.max_batch)) for device in cluster.devices)
    sizes = [
        max([1, *(b for b in range(1, device.max_batch + 1) if device.seconds(b) <= target)])
        for device in cluster.devices
    ]
    shares: Sequence[float] | None = None
    if not fits(cluster, Plan.manual(sizes, stage=stage)):
        found = search(cluster, global_batch=sum(sizes), stages=(stage,))
        sizes, shares = [max(passes, default=0) for passes in found.micro_batches], found.shares
    plans = [
        Plan.manual(sizes, stage=stage, passes=passes, shares=shares) for passes in PASSES_OBSERVED
    ]
    return [replace(plan, transport=cluster.network.transport) for plan in plans]


def fit(
    cluster: ClusterProfile, turns: Iterable[Sequence[Observation]], *, asynchronous: bool
) -> ClusterProfile:
    """The profile with the residuals of the stages that ran.

    Args:
        cluster: measured, without residuals of these stages.
        turns: observations of the plans of `plans_to_observe`. Plans with different numbers of
            passes separate the residual of a synchronization from that of a step.
        asynchronous: the device computes while the host goes on. Then host timings of passes are
            not used, and synchronizations that cost less than their collectives are explained by
            overlap. On a CPU collectives use the cores that compute, so apparent overlap is noise.
    """
    observations = pooled(at_profiled_speed(cluster, seen) for turn in turns for seen in turn)
    if not asynchronous:
        present = _with_overheads(cluster, observations)
        cluster = _with_shared_overheads(present, {seen.plan.stage for seen in observations})
        observations = tuple(_at_speed_of(cluster, seen, present) for seen in observations)
    for stage, own in _by_stage(observations).items():
        if asynchronous and cluster.overlap == 0.0:
            cluster = replace(cluster, overlap=_least_overlap(cluster, own))
        each = _synchronization_residual(cluster, own)
        cluster = _with_residuals(cluster, stage, own, synchronization=each)
    return cluster


def refine(
    cluster: ClusterProfile, observations: Sequence[Observation], *, asynchronous: bool
) -> ClusterProfile:
    """The profile at the speeds that the ranks had in these steps.

    A curve is measured once, but a device is a few percent faster or slower a minute later. So each
    rank's curve is scaled to its pass times. The rest goes into the residual of the step:
    predictions match the observations of each stage on average, and a single plan exactly.

    Args:
        cluster: measured, with the residuals of `fit`.
        observations: of any plans.
        asynchronous: as for `fit`; pass times are not used.
    """
    if not asynchronous:
        cluster = _at_observed_speeds(cluster, observations)
    for stage, own in _by_stage(observations).items():
        each = cluster.network.synchronization_seconds[stage]
        cluster = _with_residuals(cluster, stage, own, synchronization=each)
    return cluster


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


def _at_observed_speeds(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> ClusterProfile:
    """Scale the curve of each rank to its passes without their overheads."""

    def factor(rank: int, device: DeviceProfile) -> float:
        computed = profiled = 0.0
        for seen in observations:
            overhead = device.pass_overhead_seconds[seen.plan.stage]
            for size, seconds in _passes(seen, rank):
                computed += seconds - overhead
                profiled += device.seconds(size)
        return _plausible(computed / profiled) if profiled else 1.0

    factors = [factor(rank, device) for rank, device in enumerate(cluster.devices)]
    return with_slower_devices(cluster, factors)


def _plausible(slowdown: float) -> float:
    return min(max(slowdown, 1.0 / LARGEST_SLOWDOWN), LARGEST_SLOWDOWN)


def _at_speed_of(
    cluster: ClusterProfile, seen: Observation, present: ClusterProfile
) -> Observation:
    """The step of `seen`, which ran on `present` devices, as on those of `cluster`."""
    plan = seen.plan
    wanted, took = (
        costs_of(each, plan).step_seconds(plan.micro_batches, plan.shares)
        for each in (cluster, present)
    )
    return replace(seen, step_seconds=seen.step_seconds * wanted / took)


def _with_overheads(cluster: ClusterProfile, observations: Sequence[Observation]) -> ClusterProfile:
    """Charge each stage with the time of its passes beyond the curves, and outside of passes."""

    def measured(rank: int, device: DeviceProfile) -> DeviceProfile:
        per_pass, per_step = list(device.pass_overhead_seconds), list(device.step_overhead_seconds)
        for stage, own in _by_stage(observations).items():
            passes = [each for seen in own for each in _passes(seen, rank)]
            if passes:
                extra = median(seconds - device.seconds(size) for size, seconds in passes)
                per_pass[stage] = max(0.0, extra)
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

    return replace(cluster, devices=tuple(map(with_least, cluster.devices)))


def _with_residuals(
    cluster: ClusterProfile,
    stage: int,
    observations: Iterable[Observation],
    *,
    synchronization: float,
) -> ClusterProfile:
    """With this residual of a synchronization, and what is left on average as that of the step."""
    residuals = _replaced(cluster.network.synchronization_seconds, stage, synchronization)
    network = replace(cluster.network, synchronization_seconds=residuals)
    cluster = replace(cluster, network=network)
    once = mean(_unexplained_seconds(cluster, seen) for seen in observations)
    network = replace(network, step_seconds=_replaced(network.step_seconds, stage, once))
    return replace(cluster, network=network)


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
    update = max(map(costs.optimizer_seconds, range(plan.world_size), plan.shares))
    gather = costs.gather_after_step_seconds(plan.shares)
    return observation.step_seconds - synchronized - update - gather


def _least_overlap(cluster: ClusterProfile, observations: Sequence[Observation]) -> float:
    """The least overlap, at most 1, at which a synchronization costs no less than its collectives.

    0 if overlap has no effect.
    """

    def missing(step: int) -> float:
        with_overlap = replace(cluster, overlap=step / _OVERLAP_STEPS)
        return _synchronization_residual(with_overlap, observations)

    if missing(_OVERLAP_STEPS) <= missing(0):
        return 0.0
    return bisect_left(range(_OVERLAP_STEPS), 0.0, key=missing) / _OVERLAP_STEPS


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


def _replaced(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
