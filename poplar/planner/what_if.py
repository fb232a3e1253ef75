"""What-if questions: clusters that differ from a measured one in one respect, and plans on them.

Everything that was measured and is not asked about stays. Where a change goes beyond what was
measured (batches above the largest), the measured curves are extended in straight lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from poplar.plan import STRATEGIES, Plan
from poplar.planner.search import search
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile

_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


def plan_or_reason(cluster: ClusterProfile, **request: Any) -> Plan | str:
    """The plan that `search` finds for a request, or why it finds none."""
    try:
        return search(cluster, **request)
    except ValueError as error:
        return str(error)


def with_memory(cluster: ClusterProfile, added_bytes: Mapping[int, int]) -> ClusterProfile:
    """The cluster with more memory on some ranks."""
    devices = list(cluster.devices)
    for rank, added in added_bytes.items():
        devices[rank] = replace(devices[rank], memory_bytes=devices[rank].memory_bytes + added)
    return replace(cluster, devices=tuple(devices))


def with_faster_devices(
    cluster: ClusterProfile, ranks: Collection[int], factor: float
) -> ClusterProfile:
    """The cluster with passes and optimizer steps of some ranks `factor` times as fast."""
    slowdowns = [1.0 / factor if rank in ranks else 1.0 for rank in range(cluster.world_size)]
    return with_slower_devices(cluster, slowdowns)


def with_slower_devices(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """The cluster with passes and optimizer steps that take `factors[rank]` times as long."""
    slower = zip(cluster.devices, factors, strict=True)
    return replace(cluster, devices=tuple(_slower(device, factor) for device, factor in slower))


def with_faster_network(cluster: ClusterProfile, factor: float) -> ClusterProfile:
    """The cluster with collectives `factor` times as fast; other costs of a step stay."""
    network = cluster.network
    faster = replace(
        network,
        reduce_scatter_seconds=network.reduce_scatter_seconds / factor,
        all_gather_seconds=network.all_gather_seconds / factor,
    )
    return replace(cluster, network=faster)


def with_overlap(cluster: ClusterProfile, overlap: float) -> ClusterProfile:
    """The cluster with this fraction of the communication under compute, where there is compute."""
    return replace(cluster, overlap=overlap)


def with_larger_batches(cluster: ClusterProfile, factor: int) -> ClusterProfile:
    """The cluster with curves up to `factor` times the largest measured batch of each rank."""
    return replace(cluster, devices=tuple(_extended(device, factor) for device in cluster.devices))


def with_activations(cluster: ClusterProfile, fraction: float) -> ClusterProfile:
    """The cluster with this fraction of the measured activation memory."""

    def smaller(device: DeviceProfile) -> DeviceProfile:
        points = tuple(
            replace(point, activation_bytes=int(fraction * point.activation_bytes))
            for point in device.points
        )
        return replace(device, points=points)

    return replace(cluster, devices=tuple(map(smaller, cluster.devices)))


def with_copies(cluster: ClusterProfile, rank: int, copies: int) -> ClusterProfile:
    """The cluster with `copies` more ranks like `rank`, behind the existing ones.

    For questions of memory: collectives keep their measured seconds.
    """
    network = cluster.network
    send, receive = network.send_seconds_per_byte, network.receive_seconds_per_byte
    return replace(
        cluster,
        devices=cluster.devices + (cluster.devices[rank],) * copies,
        network=replace(
            network,
            send_seconds_per_byte=send + (send[rank],) * copies,
            receive_seconds_per_byte=receive + (receive[rank],) * copies,
        ),
    )


def without(cluster: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """The cluster without some ranks; at least one must be left.

    The time of collectives among the others follows from the links: the slowest one bounds it, and
    each of `n` ranks moves `(n - 1) / n` of the buffer. A single rank has no collectives.
    """
    left = [rank for rank in range(cluster.world_size) if rank not in ranks]
    return replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in left),
        network=_network_among(cluster.network, left),
    )


def _slower(device: DeviceProfile, factor: float) -> DeviceProfile:
    if factor == 1.0:
        return device
    return replace(
        device,
        points=tuple(point.times(factor) for point in device.points),
        optimizer_seconds=device.optimizer_seconds * factor,
        optimizer_latency_seconds=device.optimizer_latency_seconds * factor,
    )


def _extended(device: DeviceProfile, factor: int) -> DeviceProfile:
    """One more point, on the steeper of the last segment and the line from first to last point."""
    if len(device.points) < 2:
        return device
    first, before, last = (device.points[at].batch for at in (0, -2, -1))
    batch = factor * last

    def extrapolated(low: float, near: float, end: float) -> float:
        slope = max((end - near) / (last - before), (end - low) / (last - first))
        return end + slope * (batch - last)

    activations = extrapolated(*map(device.activation_bytes, (first, before, last)))
    point = BatchPoint(
        batch=batch,
        seconds=extrapolated(*map(device.seconds, (first, before, last))),
        activation_bytes=round(activations),
    )
    return replace(device, points=(*device.points, point))


def _network_among(network: NetworkProfile, left: Sequence[int]) -> NetworkProfile:
    before, after = len(network.send_seconds_per_byte), len(left)
    send = tuple(network.send_seconds_per_byte[rank] for rank in left)
    receive = tuple(network.receive_seconds_per_byte[rank] for rank in left)
    slowest_before = max(*network.send_seconds_per_byte, *network.receive_seconds_per_byte)
    slowest = max(*send, *receive) / slowest_before if slowest_before else 1.0
    scale = slowest * (after - 1) / after * before / (before - 1) if before > 1 else 1.0
    if after == 1:
        network = replace(
            network, synchronization_seconds=_NO_RESIDUALS, step_seconds=_NO_RESIDUALS
        )
    return replace(
        network,
        reduce_scatter_seconds=scale * network.reduce_scatter_seconds,
        all_gather_seconds=scale * network.all_gather_seconds,
        send_seconds_per_byte=send,
        receive_seconds_per_byte=receive,
    )
