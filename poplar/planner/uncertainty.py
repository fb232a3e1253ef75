"""Which micro-batches of a plan were never measured, and how slow they may be at most.

Passes often grow in steps (matrix tiles, waves of blocks), so a batch between two measured ones may
take as long as the larger one. A search that trusts interpolation picks exactly such batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from poplar.values.plan import Plan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile


def unmeasured_batches(cluster: ClusterProfile, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By rank, the micro-batch sizes of the plan that are not points of the rank's curve.

    Empty for a rank that recomputes units: its curve lies between two measured ones.
    """
    return tuple(
        ()
        if plan.recomputed_units(rank)
        else tuple(sorted(set(sizes) - {point.batch for point in device.points} - {0}))
        for rank, (sizes, device) in enumerate(
            zip(plan.micro_batches, cluster.devices, strict=True)
        )
    )


def at_worst(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster on which every unmeasured batch takes as long as the next larger measured one.

    A pass never takes less time for more samples, so this is an upper bound. The best plan on it
    uses measured batches, or batches that cost no more.
    """
    return replace(cluster, devices=tuple(map(_at_worst, cluster.devices)))


def _at_worst(device: DeviceProfile) -> DeviceProfile:
    fully = replace(device, points=device.recomputed_points or device.points)
    recomputed = tuple(_stepped(fully)) if device.recomputed_points else ()
    return replace(device, points=tuple(_stepped(device)), recomputed_points=recomputed)


def _stepped(device: DeviceProfile) -> list[BatchPoint]:
    """The points, and before each one a point of equal time right after its predecessor."""
    points = []
    for previous, batch in pairwise([0, *(point.batch for point in device.points)]):
        for size in sorted({previous + 1, batch}):
            during, after = device.unit_bytes(size)
            points.append(
                BatchPoint(
                    batch=size,
                    seconds=device.seconds(batch),
                    activation_bytes=round(device.activation_bytes(size)),
                    unit_bytes=tuple(map(round, during)),
                    bytes_after_unit=tuple(map(round, after)),
                )
            )
    return points
