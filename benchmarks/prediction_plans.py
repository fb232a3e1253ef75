"""The plans of `prediction.py`: the result of the search, and other plans to compare it with.

All plans of one configuration (cluster, model, stage) have the same global batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from poplar import Plan, search
from poplar.values.profile import ClusterProfile

CHOSEN = "chosen by the search"

Speeds = Sequence[float]
Maker = Callable[[int, Speeds, Sequence[int], int], Plan]
"""A plan from a global batch, the ranks' speeds, their largest micro-batches and a stage."""


def even(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """Equal batches, as in DDP and FSDP."""
    return Plan.even(len(speeds), batch, min(caps), stage)


def proportional(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """Samples proportional to speed."""
    return Plan.proportional(speeds, batch, stage, caps)


def proportional_in_small_passes(
    batch: int, speeds: Speeds, caps: Sequence[int], stage: int
) -> Plan:
    """Samples proportional to speed, in several passes."""
    return Plan.proportional(speeds, batch, stage, [min(5, cap) for cap in caps])


def all_owned_by_the_fastest(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """The fastest rank owns the whole sharded state."""
    fastest = speeds.index(max(speeds))
    shares = [float(rank == fastest) for rank in range(len(speeds))]
    return Plan.proportional(speeds, batch, stage, caps, shares=shares)


def slowest_without_samples(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """The slowest rank has a share of the state but no samples."""
    slowest = len(speeds) - 1 - speeds[::-1].index(min(speeds))
    working = [speed * (rank != slowest) for rank, speed in enumerate(speeds)]
    return Plan.proportional(working, batch, stage, caps)


MAKERS: tuple[Maker, ...] = (
    even,
    proportional,
    proportional_in_small_passes,
    all_owned_by_the_fastest,
    slowest_without_samples,
)


def plans_for(profile: ClusterProfile, stage: int, most: int) -> dict[str, Plan]:
    """The plan that the search chooses and the other plans, at one global batch.

    Args:
        profile: of the cluster.
        stage: of all plans.
        most: the largest global batch. Between three quarters of it and it, the batch is used for
            which the part of the other plans' micro-batches without a point is nearest to a half.

    Returns:
        Different plans by name, the chosen one first.

    Raises:
        NoPlanFits: no plan fits at this stage.
    """
    batches = range(most, 3 * most // 4 - 1, -1)
    offered = {batch: _others(profile, stage, batch) for batch in batches}
    batch = min(batches, key=lambda b: abs(mean_unprofiled(offered[b].values(), profile) - 0.5))
    chosen = search(  # all plans run on one optimizer, whose factored layers stay
        profile, global_batch=batch, stages=(stage,), leave_out="never", factored="never"
    )
    others = {kind: plan for kind, plan in offered[batch].items() if plan != chosen}
    return {CHOSEN: chosen, **others}


def _others(profile: ClusterProfile, stage: int, batch: int) -> dict[str, Plan]:
    speeds = [device.max_batch / device.seconds(device.max_batch) for device in profile.devices]
    caps = [device.max_batch for device in profile.devices]
    plans: dict[str, Plan] = {}
    for make in MAKERS:
        plan = make(batch, speeds, caps, stage)
        if plan not in plans.values():
            plans[make.__name__.replace("_", " ")] = plan
    return plans


def mean_unprofiled(plans: Iterable[Plan], profile: ClusterProfile) -> float:
    """Mean of `part_unprofiled` over several plans."""
    return statistics.mean(part_unprofiled(plan, profile) for plan in plans)


def part_unprofiled(plan: Plan, profile: ClusterProfile) -> float:
    """Part of the passes with samples whose size is not a point of the rank's curve."""
    measured = [{point.batch for point in device.points} for device in profile.devices]
    known = [
        size in points
        for points, sizes in zip(measured, plan.micro_batches, strict=True)
        for size in sizes
        if size
    ]
    return known.count(False) / len(known)
