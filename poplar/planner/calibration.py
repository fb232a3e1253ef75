"""Fits the residuals of the cost model to measured steps, by stage and rank.

Values in, values out. Plain passes do not include hooks, packing, or communication threads on the
same cores; engine steps do. The extra time of a rank's passes becomes its overhead, the remaining
extra time of a step becomes a residual of its synchronizations and of the step. Noise makes the fit
less accurate, but never makes it fail.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean, median

from poplar.observation import Observation, Slowdown, Trials
from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, GATHERS, Plan
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
    """One plan with few and one with more passes, with passes of equal length on all ranks.

    Shares are even where memory allows, else those that a search finds.

    Raises:
        NoPlanFits: not even a few samples fit at this stage.
    """
    target = max(device.seconds(min(2, device.max_batch)) for device in cluster.devices)
    sizes = [
        max([1, *(b for b in range(1, device.max_batch + 1) if device.seconds(b) <= target)])
        for device in cluster.devices
    ]
    shares = (1.0 / len(sizes),) * len(sizes)
    if not fits(cluster, Plan.manual(sizes, stage=stage, shares=shares)):
        found = search(cluster, global_batch=sum(sizes), stages=(stage,))
        shares = found.shares
        if not fits(cluster, Plan.manual(sizes, stage=stage, shares=shares)):
            sizes = [max(passes, default=0) for passes in found.micro_batches]
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
    trials = Trials([at_profiled_speed(cluster, seen) for seen in turn] for turn in turns)
    observations: Sequence[Observation] = trials.observations()
    if not asynchronous:
        cluster = _with_overheads(cluster, observations)
        cluster, observations = _with_shared_overheads(cluster, observations)
    for stage, own in _by_stage(observations).items():
        cluster = _with_step_residuals(cluster, stage, own)
        may_overlap = asynchronous and stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS
        unexplained = cluster.network.synchronization_seconds[stage] < 0.0
        if may_overlap and unexplained and cluster.overlap == 0.0:
            overlap = _least_overlap(cluster, stage, own)
            cluster = _with_step_residuals(replace(cluster, overlap=overlap), stage, own)
    return cluster


def refine(
    cluster: ClusterProfile, observations: Sequence[Observation], *, asynchronous: bool
) -> ClusterProfile:
    """The profile whose predictions match the observations of each stage, on average.

    Pass times go into the ranks' overheads, the rest into the residual of the step. A stage with a
    single plan is predicted exactly.
    """
    if not asynchronous:
        cluster = _with_overheads(cluster, observations)
    for stage, own in _by_stage(observations).items():
        missing = mean(_unexplained_seconds(cluster, seen) for seen in own)
        each = cluster.network.synchronization_seconds[stage]
        cluster = _with_residuals(cluster, stage, synchronization=each, step=missing)
    return cluster


def at_profiled_speed(cluster: ClusterProfile, observation: Observation) -> Observation:
    """The observation that devices as fast as their profiled curves would have given.

    Without this, a device that is slower for a few seconds would be charged for it as engine
    overhead in every pass of every plan of that stage: 1.2 to 2.3 times the prediction error on
    simulated clusters. Unchanged if it has no slowdowns.
    """
    slowdowns = tuple(map(_plausible, observation.slowdowns))
    if not slowdowns:
        return observation
    plan = observation.plan
    slower = with_slower_devices(cluster, [slowdown.factor for slowdown in slowdowns])
    profiled, present = (
        costs_of(each, plan).step_seconds(plan.micro_batches, plan.shares)
        for each in (cluster, slower)
    )
    step_seconds = observation.step_seconds * profiled / present
    speed_error = max(
        slowdown.error
        for slowdown, passes in zip(slowdowns, plan.micro_batches, strict=True)
        if any(passes)
    )
    return replace(
        observation,
        step_seconds=step_seconds,
        spread_seconds=math.hypot(
            observation.spread_seconds * profiled / present, step_seconds * speed_error
        ),
        pass_seconds=tuple(
            tuple(seconds / slowdown.factor for seconds in passes)
            for passes, slowdown in zip(observation.pass_seconds, slowdowns, strict=True)
        ),
        slowdowns=(),
    )


def at_observed_speeds(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> ClusterProfile:
    """The profile with each rank's curve scaled to the speed that it had in these steps.

    A curve is measured once, but a device is a few percent faster or slower a minute later. Steps
    in which all ranks run together show their present speeds relative to each other.
    """
    stages = {observation.plan.stage for observation in observations}

    def scaled(rank: int, device: DeviceProfile) -> DeviceProfile:
        expected = sum(
            device.seconds(size) + device.pass_overhead_seconds[observation.plan.stage]
            for observation in observations
            for size in observation.plan.micro_batches[rank]
            if size
        )
        if not expected:
            return device
        seconds = sum(sum(observation.pass_seconds[rank]) for observation in observations)
        factor = _plausible(Slowdown(seconds / expected, 0.0)).factor
        overheads = (
            factor * overhead if stage in stages else overhead
            for stage, overhead in enumerate(device.pass_overhead_seconds)
        )
        return replace(
            device,
            points=tuple(point.times(factor) for point in device.points),
            pass_overhead_seconds=tuple(overheads),
        )

    devices = tuple(scaled(rank, device) for rank, device in enumerate(cluster.devices))
    return replace(cluster, devices=devices)


def _plausible(slowdown: Slowdown) -> Slowdown:
    """The slowdown within `LARGEST_SLOWDOWN`; what was cut off is added to its error."""
    factor = min(max(slowdown.factor, 1.0 / LARGEST_SLOWDOWN), LARGEST_SLOWDOWN)
    return Slowdown(factor, slowdown.error + abs(slowdown.factor - factor) / factor)


def _with_overheads(cluster: ClusterProfile, observations: Sequence[Observation]) -> ClusterProfile:
    for stage, own in _by_stage(observations).items():
        devices = (_with_overhead(d, rank, stage, own) for rank, d in enumerate(cluster.devices))
        cluster = replace(cluster, devices=tuple(devices))
    return cluster


def _with_overhead(
    device: DeviceProfile, rank: int, stage: int, observations: Sequence[Observation]
) -> DeviceProfile:
    extra = [
        taken - device.seconds(size)
        for seen in observations
        for taken, size in zip(
            seen.pass_seconds[rank], filter(None, seen.plan.micro_batches[rank]), strict=True
        )
    ]
    overhead = max(0.0, median(extra)) if extra else device.pass_overhead_seconds[stage]
    other = median(seen.other_seconds[rank] for seen in observations)
    return replace(
        device,
        pass_overhead_seconds=_replaced(device.pass_overhead_seconds, stage, overhead),
        step_overhead_seconds=_replaced(device.step_overhead_seconds, stage, other),
    )


def _with_shared_overheads(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> tuple[ClusterProfile, list[Observation]]:
    """Give each rank one pass overhead for all stages that do not shard parameters.

    Passes of these stages differ only in where gradients are packed to. So the smallest overhead is
    used. The excess of another stage counts as a temporary slowdown, and its steps are shortened.
    On simulated clusters, predictions without this have 1.2 to 2 times the error.
    """

    def with_shared_overhead(rank: int, device: DeviceProfile) -> DeviceProfile:
        stages = {seen.plan.stage for seen in observations if seen.pass_seconds[rank]}
        stages &= set(range(GATHERS))
        overheads = device.pass_overhead_seconds
        least = min((overheads[stage] for stage in stages), default=0.0)
        for stage in stages:
            overheads = _replaced(overheads, stage, least)
        return replace(device, pass_overhead_seconds=overheads)

    devices = tuple(with_shared_overhead(rank, own) for rank, own in enumerate(cluster.devices))
    shared = replace(cluster, devices=devices)

    def slowdown(rank: int, seen: Observation) -> Slowdown:
        device, stage = devices[rank], seen.plan.stage
        overhead = device.pass_overhead_seconds[stage]
        sizes = [size for size in seen.plan.micro_batches[rank] if size]
        if not sizes or cluster.devices[rank].pass_overhead_seconds[stage] <= overhead:
            return Slowdown(1.0, 0.0)
        computed = sum(seen.pass_seconds[rank]) - len(sizes) * overhead
        return Slowdown(computed / sum(map(device.seconds, sizes)), 0.0)

    ranks = range(len(devices))
    return shared, [
        at_profiled_speed(
            shared, replace(seen, slowdowns=tuple(slowdown(rank, seen) for rank in ranks))
        )
        for seen in observations
    ]


def _with_step_residuals(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> ClusterProfile:
    """Set the residuals of a stage so that the closed form matches the observations on average.

    A synchronization is charged only with what exceeds one standard error, because a plan may have
    many synchronizations.
    """
    bare = _with_residuals(cluster, stage, synchronization=0.0, step=0.0)
    each, error = _synchronization_residual(bare, observations)
    each = max(each - error, 0.0) + min(each + error, 0.0)
    once = mean(
        _unexplained_seconds(bare, seen) - each * _synchronizations(seen) for seen in observations
    )
    return _with_residuals(cluster, stage, synchronization=each, step=once)


def _synchronization_residual(
    bare: ClusterProfile, observations: Sequence[Observation]
) -> tuple[float, float]:
    """Seconds per synchronization beyond the closed form, and their standard error.

    The slope of the least-squares line; 0 if all steps have equally many synchronizations.

    Args:
        bare: without residuals of the stage.
        observations: of one stage.
    """
    counts = [_synchronizations(seen) for seen in observations]
    away = [count - mean(counts) for count in counts]
    spread = math.fsum(a * a for a in away)
    if not spread:
        return 0.0, 0.0
    pairs = list(zip(away, observations, strict=True))
    slope = math.fsum(a * _unexplained_seconds(bare, seen) for a, seen in pairs) / spread
    return slope, math.hypot(*(a * seen.spread_seconds for a, seen in pairs)) / spread


def _unexplained_seconds(cluster: ClusterProfile, observation: Observation) -> float:
    """Observed step time minus the closed form without the residual of the step.

    A difference of predictions would not do: these never fall below the compute time, and they
    reject plans that do not fit.
    """
    plan = observation.plan
    costs = costs_of(cluster, plan)
    synchronized = costs.step_seconds(plan.micro_batches, plan.shares)
    synchronized -= costs.tail_seconds(plan.shares)
    updates = [costs.optimizer_seconds(rank, share) for rank, share in enumerate(plan.shares)]
    gather = costs.gather_after_step_seconds(plan.shares)
    return observation.step_seconds - synchronized - max(updates) - gather


def _least_overlap(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> float:
    """The least overlap, at most 1, at which a synchronization costs no less than its collectives.

    One standard error of the synchronization cost is allowed for. 0 if overlap has no effect.
    """
    bare = _with_residuals(cluster, stage, synchronization=0.0, step=0.0)

    def missing(step: int) -> float:
        overlap = step / _OVERLAP_STEPS
        return sum(_synchronization_residual(replace(bare, overlap=overlap), observations))

    if missing(_OVERLAP_STEPS) <= missing(0):
        return 0.0
    return bisect_left(range(_OVERLAP_STEPS), 0.0, key=missing) / _OVERLAP_STEPS


def _synchronizations(observation: Observation) -> int:
    if observation.plan.stage < FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        return 1
    return max(observation.plan.passes(rank) for rank in range(observation.plan.world_size))


def _by_stage(observations: Iterable[Observation]) -> dict[int, list[Observation]]:
    by_stage: dict[int, list[Observation]] = {}
    for seen in observations:
        by_stage.setdefault(seen.plan.stage, []).append(seen)
    return by_stage


def _with_residuals(
    cluster: ClusterProfile, stage: int, *, synchronization: float, step: float
) -> ClusterProfile:
    network = cluster.network
    network = replace(
        network,
        synchronization_seconds=_replaced(network.synchronization_seconds, stage, synchronization),
        step_seconds=_replaced(network.step_seconds, stage, step),
    )
    return replace(cluster, network=network)


def _replaced(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
