"""From steps that ran to what the closed form of a step leaves out, by stage and rank.

Arithmetic only. Plain passes know nothing of hooks, of packing, of a collective's threads on the
same core; steps of the engine do. What a rank's passes take beyond the plain ones becomes its
overhead; what a step takes beyond the closed form becomes the meeting's and the step's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, mean, median
from typing import NamedTuple

from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, GATHERS
from poplar.planner.cost_model import costs_of
from poplar.planner.what_if import with_slower_devices
from poplar.profile import ClusterProfile, DeviceProfile
from poplar.profiler.engine_steps import Observation

_HALVINGS = 40


class Slowness(NamedTuple):
    """How long plain passes of a rank took beside the steps that were observed."""

    times: float
    """Over what its curve says."""
    error: float
    """The standard error of that, as a part of it."""


def fit(
    cluster: ClusterProfile,
    trials: Mapping[int, Sequence[Observation]],
    *,
    asynchronous: bool,
    fit_overlap: bool,
) -> ClusterProfile:
    """The profile with the residuals of the stages that ran.

    Args:
        cluster: as measured so far.
        trials: by stage, what was observed; plans with different numbers of passes tell a
            meeting's residual from a step's.
        asynchronous: the device computes while the host goes on, so spans say nothing of it.
        fit_overlap: explain meetings that cost less than their collectives by overlap.
    """
    if not asynchronous:
        for stage, seen in trials.items():
            cluster = _with_overheads(cluster, stage, seen)
        cluster, trials = _agreed(cluster, trials)
    for stage, seen in trials.items():
        cluster = _with_step_residuals(cluster, stage, seen)
        overlaps = (
            fit_overlap and stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS and cluster.overlap == 0.0
        )
        if overlaps and cluster.network.synchronization_seconds[stage] < 0.0:
            overlap = _least_overlap(cluster, stage, seen)
            cluster = _with_step_residuals(replace(cluster, overlap=overlap), stage, seen)
    return cluster


def refine(
    cluster: ClusterProfile,
    stage: int,
    observations: Sequence[Observation],
    *,
    asynchronous: bool,
) -> ClusterProfile:
    """The profile whose predictions are, on average, what was observed at this stage.

    What the ranks' passes took goes into their overheads; what is then left, into the stage's step.
    A single plan is predicted exactly.
    """
    if not asynchronous:
        cluster = _with_overheads(cluster, stage, observations)
    missing = mean(_beyond_synchronizations_and_update(cluster, seen) for seen in observations)
    steps = _replaced(cluster.network.step_seconds, stage, missing)
    return replace(cluster, network=replace(cluster.network, step_seconds=steps))


def as_profiled(
    cluster: ClusterProfile, observation: Observation, slowness: Sequence[Slowness]
) -> Observation:
    """What would have been observed of ranks as fast as their curves say.

    Else a device that is slower for a few seconds would be charged for it at every pass of every
    plan of that stage, as if the engine were to blame.

    Args:
        cluster: as measured so far.
        observation: of a plan on it.
        slowness: by rank, as plain passes beside the observed steps say.
    """
    plan = observation.plan
    now = with_slower_devices(cluster, [own.times for own in slowness])
    then, present = (
        costs_of(each, plan).step_seconds(plan.micro_batches, plan.shares)
        for each in (cluster, now)
    )
    computing = [
        own.error for own, passes in zip(slowness, plan.micro_batches, strict=True) if any(passes)
    ]
    step_seconds = observation.step_seconds * then / present
    pass_seconds = tuple(
        tuple(seconds / own.times for seconds in passes)
        for passes, own in zip(observation.pass_seconds, slowness, strict=True)
    )
    known = observation.pass_errors or (0.0,) * len(slowness)
    return replace(
        observation,
        step_seconds=step_seconds,
        spread_seconds=math.hypot(
            observation.spread_seconds * then / present, step_seconds * max(computing)
        ),
        pass_seconds=pass_seconds,
        pass_errors=tuple(
            math.hypot(error / own.times, fmean(passes or [0.0]) * own.error)
            for error, own, passes in zip(known, slowness, pass_seconds, strict=True)
        ),
    )


def at_observed_speeds(
    cluster: ClusterProfile, observations: Sequence[Observation]
) -> ClusterProfile:
    """The profile with each rank as fast, over all batches, as it was in these steps.

    A curve is measured once, and a device is a few percent faster or slower a minute later: because
    of its clock, its temperature, its neighbours. Ranks that run together for many steps show their
    speeds of now, and how they compare is what a plan lives by.
    """
    stages = {observation.plan.stage for observation in observations}

    def as_fast(rank: int, device: DeviceProfile) -> DeviceProfile:
        known = sum(
            device.seconds(size) + device.pass_overhead_seconds[observation.plan.stage]
            for observation in observations
            for size in observation.plan.micro_batches[rank]
            if size
        )
        if not known:
            return device
        factor = sum(sum(observation.pass_seconds[rank]) for observation in observations) / known
        points = (point.times(factor) for point in device.points)
        overheads = (
            factor * seconds if stage in stages else seconds
            for stage, seconds in enumerate(device.pass_overhead_seconds)
        )
        return replace(device, points=tuple(points), pass_overhead_seconds=tuple(overheads))

    return replace(
        cluster, devices=tuple(as_fast(*numbered) for numbered in enumerate(cluster.devices))
    )


def _with_overheads(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> ClusterProfile:
    devices = (
        _with_overhead(device, rank, stage, observations)
        for rank, device in enumerate(cluster.devices)
    )
    return replace(cluster, devices=tuple(devices))


def _agreed(
    cluster: ClusterProfile, trials: Mapping[int, Sequence[Observation]]
) -> tuple[ClusterProfile, dict[int, list[Observation]]]:
    """Where parameters are whole, passes are alike at every stage but for where they pack to.

    What passes take at one stage beyond another is then the machine's moment: it is charged to no
    stage, and steps are taken for as much shorter as their passes should have been.
    """
    devices = []
    for rank, device in enumerate(cluster.devices):
        overheads = device.pass_overhead_seconds
        alike = [
            stage
            for stage, seen in trials.items()
            if stage < GATHERS and any(each.pass_seconds[rank] for each in seen)
        ]
        least = min((overheads[stage] for stage in alike), default=0.0)
        for stage in alike:
            overheads = _replaced(overheads, stage, least)
        devices.append(replace(device, pass_overhead_seconds=overheads))
    agreed = replace(cluster, devices=tuple(devices))

    def slowness(rank: int, seen: Observation) -> Slowness:
        device, stage = agreed.devices[rank], seen.plan.stage
        overhead = device.pass_overhead_seconds[stage]
        sizes = [size for size in seen.plan.micro_batches[rank] if size]
        if not sizes or cluster.devices[rank].pass_overhead_seconds[stage] <= overhead:
            return Slowness(1.0, 0.0)
        computed = sum(seen.pass_seconds[rank]) - len(sizes) * overhead
        return Slowness(computed / sum(map(device.seconds, sizes)), 0.0)

    return agreed, {
        stage: [
            as_profiled(agreed, each, [slowness(rank, each) for rank in range(len(devices))])
            for each in seen
        ]
        for stage, seen in trials.items()
    }


def _with_overhead(
    device: DeviceProfile, rank: int, stage: int, observations: Sequence[Observation]
) -> DeviceProfile:
    extra: list[float] = []
    other: list[float] = []
    errors: list[float] = []
    for observation in observations:
        batches = [size for size in observation.plan.micro_batches[rank] if size]
        own = observation.pass_seconds[rank]
        extra += [taken - device.seconds(size) for taken, size in zip(own, batches, strict=True)]
        other.append(observation.other_seconds[rank])
        errors += observation.pass_errors[rank : rank + 1]
    overhead = device.pass_overhead_seconds[stage]
    if extra:
        # The engine adds work to a pass, never takes any away; and what may be the machine's noise
        # must not be counted once for each of many passes: it stays with the step.
        noise = math.hypot(*errors) / max(1, len(errors))
        overhead = max(0.0, median(extra) - noise)
    return replace(
        device,
        pass_overhead_seconds=_replaced(device.pass_overhead_seconds, stage, overhead),
        step_overhead_seconds=_replaced(device.step_overhead_seconds, stage, median(other)),
    )


def _with_step_residuals(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> ClusterProfile:
    """Make the closed form agree with the observations, on average.

    A meeting is charged with what is beyond one standard error: plans have many of them.
    """
    each = _beyond_collectives(cluster, stage, observations)
    unsure = _error_of_slope(observations)
    each = max(each - unsure, 0.0) + min(each + unsure, 0.0)
    bare = _without_synchronization_residual(cluster, stage)
    once = mean(
        _beyond_synchronizations_and_update(bare, seen) - each * _synchronizations(seen)
        for seen in observations
    )
    network = replace(
        cluster.network,
        synchronization_seconds=_replaced(cluster.network.synchronization_seconds, stage, each),
        step_seconds=_replaced(cluster.network.step_seconds, stage, once),
    )
    return replace(cluster, network=network)


def _beyond_collectives(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> float:
    """What each meeting took beyond the closed form without residuals."""
    bare = _without_synchronization_residual(cluster, stage)
    missing = [
        _beyond_synchronizations_and_update(bare, observation) for observation in observations
    ]
    return _slope([_synchronizations(observation) for observation in observations], missing)


def _beyond_synchronizations_and_update(cluster: ClusterProfile, observation: Observation) -> float:
    """What the step took beyond the closed form: the residual that a step would need.

    Not a difference of predictions: these never fall below the compute, and know nothing of a plan
    that has turned out not to fit.
    """
    plan = observation.plan
    costs = costs_of(cluster, plan)
    met = costs.step_seconds(plan.micro_batches, plan.shares) - costs.tail_seconds(plan.shares)
    updates = [costs.optimizer_seconds(rank, share) for rank, share in enumerate(plan.shares)]
    gather = costs.gather_after_step_seconds(plan.shares)
    return observation.step_seconds - met - max(updates) - gather


def _without_synchronization_residual(cluster: ClusterProfile, stage: int) -> ClusterProfile:
    synchronizations = _replaced(cluster.network.synchronization_seconds, stage, 0.0)
    return replace(
        cluster, network=replace(cluster.network, synchronization_seconds=synchronizations)
    )


def _least_overlap(
    cluster: ClusterProfile, stage: int, observations: Sequence[Observation]
) -> float:
    """The least overlap at which a meeting costs no less than its collectives, but for what noise
    explains; at most 1.
    """
    unsure = _error_of_slope(observations)

    def missing(overlap: float) -> float:
        without = replace(cluster, overlap=overlap)
        return _beyond_collectives(without, stage, observations) + unsure

    nothing, everything = missing(0.0), missing(1.0)
    if everything <= nothing:
        return 0.0  # nothing can overlap
    if everything <= 0.0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if missing(middle) >= 0.0 else (middle, high)
    return high


def _synchronizations(observation: Observation) -> int:
    if observation.plan.stage < FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        return 1
    return max(observation.plan.passes(rank) for rank in range(observation.plan.world_size))


def _slope(at: Sequence[int], values: Sequence[float]) -> float:
    """Of the straight line nearest to the points; 0 where all lie at one place."""
    middle, spread = mean(at), sum((place - mean(at)) ** 2 for place in at)
    if not spread:
        return 0.0
    height = mean(values)
    pairs = zip(at, values, strict=True)
    return sum((place - middle) * (value - height) for place, value in pairs) / spread


def _error_of_slope(observations: Sequence[Observation]) -> float:
    """The standard error of what a meeting takes, from those of the steps."""
    at = [_synchronizations(observation) for observation in observations]
    away = [place - mean(at) for place in at]
    spread = math.fsum(a * a for a in away)
    if not spread:
        return 0.0
    errors = (observation.spread_seconds for observation in observations)
    return math.hypot(*(a * error for a, error in zip(away, errors, strict=True))) / spread


def _replaced(values: Sequence[float], at: int, value: float) -> tuple[float, ...]:
    return (*values[:at], value, *values[at + 1 :])
