"""Groups of devices that are equal up to measurement noise.

Ranks are in one group if their devices have the same name, and memory, links and pass times within
a few percent. (`rank_groups` groups ranks that are exactly equal.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from poplar.values.profile import ClusterProfile

MAX_GROUPS = 12
"""What fits a table. With more groups, the tolerance is doubled until there are no more."""
_MAX_UNEQUAL_RANKS = 32
_TOLERANCES = [0.05 * 2**doublings for doublings in range(11)]
"""Largest relative difference within a group. Medians of one card differ by the first."""


class DeviceGroup(NamedTuple):
    """Ranks with equal devices, up to noise."""

    device: str
    """The devices' name."""
    ranks: tuple[int, ...]
    """Ascending; the first represents the group."""


def device_groups(cluster: ClusterProfile) -> tuple[DeviceGroup, ...]:
    """The groups of a cluster by their first rank; at most `MAX_GROUPS` unless names differ."""
    figures = [_figures(cluster, rank) for rank in range(cluster.world_size)]
    names = [device.name for device in cluster.devices]

    def are_equal(first: int, rank: int, tolerance: float) -> bool:
        """Relative to the smaller figure: at 5 %, twice as much is never equal."""
        pairs = zip(figures[first], figures[rank], strict=True)
        return names[first] == names[rank] and all(
            abs(a - b) <= tolerance * min(a, b) for a, b in pairs
        )

    for tolerance in _TOLERANCES:
        groups: dict[int, list[int]] = {}
        for rank in range(cluster.world_size):
            first = next((one for one in groups if are_equal(one, rank, tolerance)), rank)
            groups.setdefault(first, []).append(rank)
        if len(groups) <= MAX_GROUPS:
            break
    return tuple(DeviceGroup(names[first], tuple(ranks)) for first, ranks in groups.items())


def with_equal_devices(cluster: ClusterProfile, groups: Sequence[DeviceGroup]) -> ClusterProfile:
    """Large clusters with exactly equal devices within each group, so that searches are fast.

    Each group gets the device and links of median speed, with the least memory of any of its ranks.
    """
    if cluster.world_size <= _MAX_UNEQUAL_RANKS:
        return cluster
    median, devices = list(range(cluster.world_size)), list(cluster.devices)
    for group in groups:
        own = [cluster.devices[rank] for rank in group.ranks]
        largest = min(device.max_batch for device in own)
        by_speed = sorted(group.ranks, key=lambda rank: cluster.devices[rank].seconds(largest))
        middle = by_speed[len(by_speed) // 2]
        memory_bytes = min(device.memory_bytes for device in own)
        device = replace(cluster.devices[middle], memory_bytes=memory_bytes)
        for rank in group.ranks:
            median[rank], devices[rank] = middle, device
    links = replace(of_ranks(cluster, median).network, hosts=cluster.network.hosts)
    return replace(cluster, devices=tuple(devices), network=links)


def of_ranks(cluster: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """The cluster with the devices and links of these ranks, in this order."""
    network = cluster.network
    links = replace(
        network,
        send_seconds_per_byte=tuple(network.send_seconds_per_byte[rank] for rank in ranks),
        receive_seconds_per_byte=tuple(network.receive_seconds_per_byte[rank] for rank in ranks),
        hosts=tuple(network.hosts[rank] for rank in ranks if network.hosts),
        network_seconds_per_byte=tuple(
            network.network_seconds_per_byte[rank]
            for rank in ranks
            if network.network_seconds_per_byte
        ),
    )
    devices = tuple(cluster.devices[rank] for rank in ranks)
    return replace(cluster, devices=devices, network=links)


def _figures(cluster: ClusterProfile, rank: int) -> list[float]:
    """Memory, links, and seconds per sample of small, middle and large passes at each stage."""
    device, network = cluster.devices[rank], cluster.network
    largest = device.max_batch
    overheads = (*device.pass_overhead_seconds, *device.step_overhead_seconds)
    return [
        largest,
        device.memory_bytes - device.held_bytes,
        device.activation_bytes(largest),
        device.optimizer_seconds,
        network.send_seconds_per_byte[rank],
        network.receive_seconds_per_byte[rank],
        *(device.seconds(batch) / batch for batch in (1, (largest + 1) // 2, largest)),
        *((device.seconds(largest) + overhead) / largest for overhead in overheads),
    ]
