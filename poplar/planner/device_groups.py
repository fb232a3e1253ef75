"""Kinds of devices: ranks that are equal but for noise, so that what helps one helps all of them.

Two cards of one model never measure alike to the last digit (ranks that do are `kinds`, which
searches count). Ranks are alike here if their devices have one name, and memory, links and passes
that differ by a few percent at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from poplar.profile import ClusterProfile, DeviceProfile

MOST_KINDS = 12
"""More than a person reads of; beyond, devices that differ more are taken as alike."""
_ALIKE = 0.05
"""Largest difference within a kind, as a fraction: what medians of one card differ by."""
_MOST_DIFFERENT = 64.0


class Kind(NamedTuple):
    """Ranks with devices that are alike."""

    device: str
    """Its name."""
    ranks: tuple[int, ...]
    """Ascending; the first stands for all of them."""


def alike_kinds(cluster: ClusterProfile) -> tuple[Kind, ...]:
    """The kinds of a cluster, by their first ranks; at most `MOST_KINDS`, if names allow it."""
    tolerance = _ALIKE
    found = _grouped(cluster, tolerance)
    while len(found) > MOST_KINDS and tolerance < _MOST_DIFFERENT:
        tolerance *= 2.0
        found = _grouped(cluster, tolerance)
    return found


def without_noise(cluster: ClusterProfile, found: Sequence[Kind]) -> ClusterProfile:
    """The cluster with equal devices where they are alike, so that a search counts kinds.

    Each kind gets the device of middle speed, and the least memory that any of its ranks has.
    """
    devices, network = list(cluster.devices), cluster.network
    send, receive = list(network.send_seconds_per_byte), list(network.receive_seconds_per_byte)
    for kind in found:
        most = min(cluster.devices[rank].max_batch for rank in kind.ranks)
        by_speed = sorted((cluster.devices[rank].seconds(most), rank) for rank in kind.ranks)
        middle = by_speed[len(by_speed) // 2][1]
        memory = min(cluster.devices[rank].memory_bytes for rank in kind.ranks)
        device = replace(cluster.devices[middle], memory_bytes=memory)
        for rank in kind.ranks:
            devices[rank] = device
            send[rank] = network.send_seconds_per_byte[middle]
            receive[rank] = network.receive_seconds_per_byte[middle]
    return replace(
        cluster,
        devices=tuple(devices),
        network=replace(
            network,
            send_seconds_per_byte=tuple(send),
            receive_seconds_per_byte=tuple(receive),
        ),
    )


def _grouped(cluster: ClusterProfile, tolerance: float) -> tuple[Kind, ...]:
    groups: list[list[int]] = []
    for rank in range(cluster.world_size):
        for group in groups:
            if _alike(cluster, group[0], rank, tolerance):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return tuple(Kind(cluster.devices[group[0]].name, tuple(group)) for group in groups)


def _alike(cluster: ClusterProfile, one: int, other: int, tolerance: float) -> bool:
    first, second = cluster.devices[one], cluster.devices[other]
    rates = zip(_rates(cluster, one), _rates(cluster, other), strict=True)
    if first.name != second.name:
        return False
    compared = list(rates)
    if first is not second:
        most = min(first.max_batch, second.max_batch)
        compared += [
            (first.max_batch, second.max_batch),
            (first.memory_bytes - first.held_bytes, second.memory_bytes - second.held_bytes),
            (first.activation_bytes(most), second.activation_bytes(most)),
            (first.optimizer_seconds, second.optimizer_seconds),
            *zip(_passes(first, most), _passes(second, most), strict=True),
        ]
    # The smaller of the two is the whole, so that a factor is never within a tolerance below 1.
    return all(abs(a - b) <= tolerance * min(a, b) for a, b in compared)


def _passes(device: DeviceProfile, most: int) -> list[float]:
    """Seconds of small, middle and large passes, and what comes with them at each stage."""
    seconds = [device.seconds(batch) for batch in sorted({1, (most + 1) // 2, most})]
    extra = (*device.pass_overhead_seconds, *device.step_overhead_seconds)
    return [*seconds, *(seconds[-1] + more for more in extra)]


def _rates(cluster: ClusterProfile, rank: int) -> tuple[float, float]:
    network = cluster.network
    return network.send_seconds_per_byte[rank], network.receive_seconds_per_byte[rank]
