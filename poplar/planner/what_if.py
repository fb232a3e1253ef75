"""Clusters that differ from a measured one in one thing, to search plans on: what if?

Everything that was measured and is not asked about stays. Where a change goes beyond what was
measured (batches above the largest), the measured curves go on in straight lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from poplar.plan import STRATEGIES
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile

_NOTHING = (0.0,) * len(STRATEGIES)


def with_memory(cluster: ClusterProfile, added_bytes: Mapping[int, int]) -> ClusterProfile:
    """Ranks that may use more, by rank in bytes."""
    return _with_devices(
        cluster,
        {
            rank: replace(
                cluster.devices[rank], memory_bytes=cluster.devices[rank].memory_bytes + added
            )
            for rank, added in added_bytes.items()
        },
    )


def with_faster_devices(
    cluster: ClusterProfile, ranks: Collection[int], times: float
) -> ClusterProfile:
    """Ranks whose passes and whose optimizer are so many times as fast."""
    return _with_devices(cluster, {rank: _faster(cluster.devices[rank], times) for rank in ranks})


def with_slower_devices(cluster: ClusterProfile, times: Sequence[float]) -> ClusterProfile:
    """Ranks whose passes and whose optimizer take so many times as long, by rank."""
    slower = zip(cluster.devices, times, strict=True)
    return replace(cluster, devices=tuple(_faster(device, 1.0 / by) for device, by in slower))


def with_faster_network(cluster: ClusterProfile, times: float) -> ClusterProfile:
    """Collectives that are so many times as fast; what a meeting costs beyond them stays."""
    network = cluster.network
    faster = replace(
        network,
        reduce_scatter_seconds=network.reduce_scatter_seconds / times,
        all_gather_seconds=network.all_gather_seconds / times,
    )
    return replace(cluster, network=faster)


def with_overlap(cluster: ClusterProfile, overlap: float) -> ClusterProfile:
    """Communication of which this part runs under compute, where there is compute to hide it."""
    return replace(cluster, overlap=overlap)


def with_larger_batches(cluster: ClusterProfile, times: int) -> ClusterProfile:
    """Ranks that may run so many times their largest measured batch, if memory allows it."""
    return replace(cluster, devices=tuple(_extended(device, times) for device in cluster.devices))


def with_copies(cluster: ClusterProfile, rank: int, copies: int) -> ClusterProfile:
    """A cluster with more devices like that of `rank`, behind those that there are.

    For questions of memory: collectives keep the seconds that they have.
    """
    network = cluster.network
    return replace(
        cluster,
        devices=cluster.devices + (cluster.devices[rank],) * copies,
        network=replace(
            network,
            send_seconds_per_byte=network.send_seconds_per_byte
            + (network.send_seconds_per_byte[rank],) * copies,
            receive_seconds_per_byte=network.receive_seconds_per_byte
            + (network.receive_seconds_per_byte[rank],) * copies,
        ),
    )


def without(cluster: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """The cluster without some ranks; at least one has to be left.

    Collectives among the others follow from the links: the slowest of them bounds the time, and of
    `n` ranks each moves `n - 1` parts of `n`. A rank alone has none.
    """
    left = [rank for rank in range(cluster.world_size) if rank not in ranks]
    return replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in left),
        network=_network_of(cluster.network, left),
    )


def _with_devices(cluster: ClusterProfile, changed: Mapping[int, DeviceProfile]) -> ClusterProfile:
    return replace(
        cluster,
        devices=tuple(changed.get(rank, device) for rank, device in enumerate(cluster.devices)),
    )


def _faster(device: DeviceProfile, times: float) -> DeviceProfile:
    return replace(
        device,
        points=tuple(point.times(1.0 / times) for point in device.points),
        optimizer_seconds=device.optimizer_seconds / times,
        optimizer_latency_seconds=device.optimizer_latency_seconds / times,
    )


def _extended(device: DeviceProfile, times: int) -> DeviceProfile:
    """One more point, on the less optimistic of the last line and the line through all points."""
    if len(device.points) < 2:
        return device
    first, before, last = (device.points[at].batch for at in (0, -2, -1))
    batch = times * last

    def at_batch(curve: tuple[float, float, float]) -> float:
        low, near, end = curve
        slope = max((end - near) / (last - before), (end - low) / (last - first))
        return end + slope * (batch - last)

    point = BatchPoint(
        batch=batch,
        seconds=at_batch((device.seconds(first), device.seconds(before), device.seconds(last))),
        activation_bytes=round(
            at_batch(
                (
                    device.activation_bytes(first),
                    device.activation_bytes(before),
                    device.activation_bytes(last),
                )
            )
        ),
    )
    return replace(device, points=(*device.points, point))


def _network_of(network: NetworkProfile, left: list[int]) -> NetworkProfile:
    before, after = len(network.send_seconds_per_byte), len(left)
    send = tuple(network.send_seconds_per_byte[rank] for rank in left)
    receive = tuple(network.receive_seconds_per_byte[rank] for rank in left)
    slowest_before = max((*network.send_seconds_per_byte, *network.receive_seconds_per_byte))
    slowest = max((*send, *receive)) / slowest_before if slowest_before else 1.0
    scale = slowest * (after - 1) / after * before / (before - 1) if before > 1 else 1.0
    alone = after == 1
    return replace(
        network,
        reduce_scatter_seconds=scale * network.reduce_scatter_seconds,
        all_gather_seconds=scale * network.all_gather_seconds,
        send_seconds_per_byte=send,
        receive_seconds_per_byte=receive,
        synchronization_seconds=_NOTHING if alone else network.synchronization_seconds,
        step_seconds=_NOTHING if alone else network.step_seconds,
    )
