"""Estimates of a plan on a cluster that was not measured, as intervals.

The plan is searched on the middle profile. An interval spans the same plan on all profiles of the
cluster: faster, slower, and one type of device slower than the others. It is not a confidence
interval: it follows from the assumed spreads of `roofline`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from poplar.hardware.simulated_cluster import SimulatedCluster
from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import StageCosts, step_seconds_of
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import memory_needed, predict
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with its range."""

    middle: float
    low: float
    high: float

    @classmethod
    def spanning(cls, values: Sequence[float]) -> Interval:
        """The interval of these values, the first as the middle."""
        return cls(middle=values[0], low=min(values), high=max(values))

    def scaled(self, factor: float) -> Interval:
        """This interval times a positive factor."""
        return Interval(middle=factor * self.middle, low=factor * self.low, high=factor * self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One plan on one simulated cluster."""

    step_seconds: Interval
    samples_per_second: Interval
    tflops: Interval
    """Model TFLOP/s of the whole cluster, without recomputation."""
    of_sum_of_speeds: Interval
    """Samples per second over the sum of speeds."""
    memory_bytes: tuple[Interval, ...]
    """Memory of each rank."""
    may_not_fit: str
    """The error of the pessimistic profile, if the plan does not fit there; else empty."""


def estimate(simulated: SimulatedCluster, plan: Plan) -> Estimate:
    """Estimate a plan.

    Args:
        plan: a plan that was searched on its middle profile.

    Raises:
        DoesNotFit: the plan does not fit the middle profile.
        ValueError: a plan for another number of ranks.
    """
    predict(simulated.middle, plan)  # raises
    may_not_fit = ""
    try:
        predict(simulated.pessimistic, plan)
    except DoesNotFit as error:
        may_not_fit = str(error)
    steps = _step_seconds(simulated, plan)
    rates = [plan.global_batch / seconds for seconds in steps]
    # With the batches that fit on the middle profile beside a share of 0.
    memories = StageCosts(simulated.middle, plan.stage).memories
    batches = [memory.largest_caps(0.0, memory.device.max_batch).first for memory in memories]
    speeds = [sum_of_speeds(cluster, batches) for cluster in simulated.outlooks]
    memory = [memory_needed(cluster, plan) for cluster in simulated.outlooks]
    rate = Interval.spanning(rates)
    return Estimate(
        step_seconds=Interval.spanning(steps),
        samples_per_second=rate,
        tflops=rate.scaled(simulated.job.flops_per_sample / 1e12),
        of_sum_of_speeds=Interval.spanning(list(map(operator.truediv, rates, speeds))),
        memory_bytes=tuple(map(Interval.spanning, zip(*memory, strict=True))),
        may_not_fit=may_not_fit,
    )


def gain(
    simulated: SimulatedCluster, plan: Plan, other: Plan, elsewhere: SimulatedCluster | None = None
) -> Interval:
    """Speed-up of `plan` over `other`, which may be for `elsewhere`, a part of the cluster.

    Both plans are evaluated on the same profiles, so the interval is narrower than that of a step.
    """
    others = _step_seconds(elsewhere or simulated, other)
    pairs = zip(others, _step_seconds(simulated, plan), strict=True)
    return Interval.spanning([theirs / ours for theirs, ours in pairs])


def sum_of_speeds(cluster: ClusterProfile, batches: Sequence[int]) -> float:
    """Samples per second over all ranks at once, each at its best batch up to `batches[rank]`."""
    speeds = []
    for device, most in zip(cluster.devices, batches, strict=True):
        sizes = [point.batch for point in device.points if point.batch < most] + [most]
        speeds.append(max(size / device.seconds(size) if size > 0 else 0.0 for size in sizes))
    return math.fsum(speeds)


def _step_seconds(simulated: SimulatedCluster, plan: Plan) -> list[float]:
    """Seconds of a step on each profile, even where the plan does not fit."""
    parts = (active_part(cluster, plan) for cluster in simulated.outlooks)
    return [step_seconds_of(cluster, own) for cluster, own in parts]
