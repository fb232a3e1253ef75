"""Estimates of a plan on a cluster that was not measured, as intervals.

The plan is searched on the middle profile. An interval spans the same plan on all profiles of the
cluster: faster, slower, and one type of device slower than the others. It is not a confidence
interval: it follows from the assumed spreads of `device_catalog`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from poplar.hardware.simulated_cluster import SimulatedCluster
from poplar.plan import Plan
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import memory_needed, predict
from poplar.profile import ClusterProfile


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

    def map(self, change: Callable[[float], float]) -> Interval:
        """The interval of a monotone function of this value."""
        return Interval.spanning([change(v) for v in (self.middle, self.low, self.high)])


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
    """By rank."""
    may_not_fit: str
    """The error of the pessimistic profile, if the plan does not fit there; else empty."""
    samples_per_price: Interval | None
    """Samples per unit of the currency, if prices are known."""

    def to_dict(self) -> dict[str, Any]:
        """This estimate as JSON types."""
        return dataclasses.asdict(self)


def estimate(simulated: SimulatedCluster, plan: Plan) -> Estimate:
    """Estimate a plan.

    Args:
        simulated: the cluster.
        plan: a plan that was searched on its middle profile.

    Raises:
        DoesNotFit: the plan does not fit the middle profile.
        ValueError: a plan for another number of ranks.
    """
    predict(simulated.middle, plan)  # raises
    steps = _step_seconds(simulated, plan)
    rates = [plan.global_batch / seconds for seconds in steps]
    speeds = _sums_of_speeds(simulated, plan.stage)
    rate = Interval.spanning(rates)
    flops = simulated.job.flops_per_sample
    price = simulated.price_per_hour
    memory = [
        memory_needed(cluster, plan)
        for cluster in (simulated.middle, simulated.optimistic, simulated.pessimistic)
    ]
    return Estimate(
        step_seconds=Interval.spanning(steps),
        samples_per_second=rate,
        tflops=rate.map(lambda samples: samples * flops / 1e12),
        of_sum_of_speeds=Interval.spanning(
            [rate / speed for rate, speed in zip(rates, speeds, strict=True)]
        ),
        memory_bytes=tuple(Interval.spanning(rank) for rank in zip(*memory, strict=True)),
        may_not_fit=_fit_error(simulated.pessimistic, plan),
        samples_per_price=rate.map(lambda samples: 3600 * samples / price) if price else None,
    )


def gain(
    simulated: SimulatedCluster,
    plan: Plan,
    other: Plan,
    elsewhere: SimulatedCluster | None = None,
) -> Interval:
    """Speed-up of `plan` over `other`, which may be for `elsewhere`, a part of the cluster.

    Both plans are evaluated on the same profiles, so the interval is narrower than that of a step.
    """
    others = _step_seconds(elsewhere or simulated, other)
    pairs = zip(others, _step_seconds(simulated, plan), strict=True)
    return Interval.spanning([theirs / ours for theirs, ours in pairs])


def sum_of_speeds(cluster: ClusterProfile, batches: Sequence[int]) -> float:
    """Samples per second over all ranks, each alone at its best batch up to `batches[rank]`."""
    speeds = []
    for device, most in zip(cluster.devices, batches, strict=True):
        sizes = [point.batch for point in device.points if point.batch <= most]
        if 1 <= most <= device.max_batch:
            sizes.append(most)
        speeds.append(max((size / device.seconds(size) for size in sizes), default=0.0))
    return math.fsum(speeds)


def _sums_of_speeds(simulated: SimulatedCluster, stage: int) -> list[float]:
    """By profile, with the batches that fit beside a share of 0 on the middle profile."""
    memories = StageCosts(simulated.middle, stage).memories
    batches = [memory.largest_batch(0.0, memory.device.max_batch) for memory in memories]
    return [sum_of_speeds(cluster, batches) for cluster in simulated.outlooks]


def _step_seconds(simulated: SimulatedCluster, plan: Plan) -> list[float]:
    """By profile, even where the plan does not fit."""
    return [
        costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)
        for cluster in simulated.outlooks
    ]


def _fit_error(pessimistic: ClusterProfile, plan: Plan) -> str:
    try:
        predict(pessimistic, plan)
    except DoesNotFit as error:
        return str(error)
    return ""
