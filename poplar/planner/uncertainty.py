"""Which micro-batches of a plan were never measured, and how slow they may be at most.

Passes often grow in steps (matrix tiles, waves of blocks), so a batch between two measured ones may
take as long as the larger one. A search that trusts interpolation picks exactly such batches.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from poplar.plan import Plan
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile


def unmeasured_batches(cluster: ClusterProfile, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By rank, the micro-batch sizes of the plan that are not points of the rank's curve."""
    return tuple(
        tuple(sorted(set(sizes) - {point.batch for point in device.points} - {0}))
        for sizes, device in zip(plan.micro_batches, cluster.devices, strict=True)
    )


def at_worst(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster on which every unmeasured batch takes as long as the next larger measured one.

    A pass never takes less time for more samples, so this is an upper bound. The best plan on it
    uses measured batches, or batches that cost no more.
    """
    devices = (replace(device, points=tuple(_stepped(device))) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _stepped(device: DeviceProfile) -> list[BatchPoint]:
    """The points, and before each one a point of equal time right after its predecessor."""
    points = []
    for previous, batch in pairwise([0, *(point.batch for point in device.points)]):
        for size in sorted({previous + 1, batch}):
            points.append(
                BatchPoint(
                    batch=size,
                    seconds=device.seconds(batch),
                    activation_bytes=round(device.activation_bytes(size)),
                )
            )
    return points
