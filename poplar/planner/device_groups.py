"""Groups of devices that are equal up to measurement noise.

Two cards of one model never measure exactly alike, so ranks are in one group if their devices have
the same name, and memory, links and pass times within a few percent. (`rank_groups` groups ranks
that are exactly equal.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from poplar.profile import ClusterProfile, DeviceProfile

MAX_GROUPS = 12
"""What fits a table. With more groups, the tolerance is doubled until there are no more."""
_TOLERANCE = 0.05
"""Largest relative difference within a group: what medians of one card differ by."""
_MAX_TOLERANCE = 64.0


class DeviceGroup(NamedTuple):
    """Ranks with equal devices, up to noise."""

    device: str
    """The devices' name."""
    ranks: tuple[int, ...]
    """Ascending; the first represents the group."""


def device_groups(cluster: ClusterProfile) -> tuple[DeviceGroup, ...]:
    """The groups of a cluster by their first rank; at most `MAX_GROUPS` unless names differ."""
    tolerance = _TOLERANCE
    groups = _grouped(cluster, tolerance)
    while len(groups) > MAX_GROUPS and tolerance < _MAX_TOLERANCE:
        tolerance *= 2.0
        groups = _grouped(cluster, tolerance)
    return groups


def with_equal_devices(cluster: ClusterProfile, groups: Sequence[DeviceGroup]) -> ClusterProfile:
    """The cluster with exactly equal devices within each group, so that searches are fast.

    Each group gets the device of median speed, with the least memory of any of its ranks.
    """
    devices, network = list(cluster.devices), cluster.network
    send, receive = list(network.send_seconds_per_byte), list(network.receive_seconds_per_byte)
    for group in groups:
        largest = min(cluster.devices[rank].max_batch for rank in group.ranks)
        by_speed = sorted((cluster.devices[rank].seconds(largest), rank) for rank in group.ranks)
        median = by_speed[len(by_speed) // 2][1]
        memory = min(cluster.devices[rank].memory_bytes for rank in group.ranks)
        device = replace(cluster.devices[median], memory_bytes=memory)
        for rank in group.ranks:
            devices[rank] = device
            send[rank] = network.send_seconds_per_byte[median]
            receive[rank] = network.receive_seconds_per_byte[median]
    network = replace(
        network, send_seconds_per_byte=tuple(send), receive_seconds_per_byte=tuple(receive)
    )
    return replace(cluster, devices=tuple(devices), network=network)


def _grouped(cluster: ClusterProfile, tolerance: float) -> tuple[DeviceGroup, ...]:
    groups: list[list[int]] = []
    for rank in range(cluster.world_size):
        for group in groups:
            if _equal_within(cluster, group[0], rank, tolerance):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(DeviceGroup(cluster.devices[group[0]].name, tuple(group)) for group in groups)


def _equal_within(cluster: ClusterProfile, one: int, other: int, tolerance: float) -> bool:
    first, second = cluster.devices[one], cluster.devices[other]
    if first.name != second.name:
        return False
    network = cluster.network
    compared: list[tuple[float, float]] = [
        (rates[one], rates[other])
        for rates in (network.send_seconds_per_byte, network.receive_seconds_per_byte)
    ]
    if first is not second:
        largest = min(first.max_batch, second.max_batch)
        compared += zip(_figures(first, largest), _figures(second, largest), strict=True)
    # Relative to the smaller value: twice as much is never within a tolerance below 1.
    return all(abs(a - b) <= tolerance * min(a, b) for a, b in compared)


def _figures(device: DeviceProfile, largest: int) -> list[float]:
    """Memory, and seconds of small, middle and large passes with the overhead of each stage."""
    seconds = [device.seconds(batch) for batch in sorted({1, (largest + 1) // 2, largest})]
    overheads = (*device.pass_overhead_seconds, *device.step_overhead_seconds)
    return [
        device.max_batch,
        device.memory_bytes - device.held_bytes,
        device.activation_bytes(largest),
        device.optimizer_seconds,
        *seconds,
        *(seconds[-1] + overhead for overhead in overheads),
    ]
