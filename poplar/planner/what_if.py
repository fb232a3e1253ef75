"""Clusters that differ from the measured one in one respect, for `explain` and `NoPlanFits`.

Each change is one function: it returns the changed cluster and a description of the change. What is
measured and not changed stays the same. Devices that are equal up to noise change together: those
with the same name, and memory, links and pass times within a few percent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from poplar.planner.active_ranks import of_ranks, without_ranks
from poplar.planner.collective_costs import rate_seconds
from poplar.planner.recomputed_curves import extended, with_recomputed_parts
from poplar.values.formatting import (
    format_bytes,
    format_percent,
    format_ranks,
    format_signed_percent,
)
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile

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


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a cluster, and what the fastest plan gains from it."""

    what: str
    """For example `"memory"`, `"device"`, `"network"`, `"overlap"` or `"batches"`."""
    amount: str
    """As text: "+8.00 GiB each"."""
    device: str = ""
    """The name of the devices that change; empty: something that all ranks share."""
    ranks: tuple[int, ...] = ()
    """The ranks whose device changes; empty: something that all ranks share."""
    gain: float = 0.0
    """Fraction by which samples per second grow: 0.12 is 12 % more."""
    stage: int | None = None
    """Of the plan after the change."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.amount} gives {format_signed_percent(self.gain)}"

    @property
    def subject(self) -> str:
        """What changes: `network`, `rank 3's memory` or `device of ranks 0-3`."""
        if not self.ranks:
            return self.what
        if len(self.ranks) == 1:
            return f"{format_ranks(self.ranks)}'s {self.what}"
        return f"{self.what} of {format_ranks(self.ranks)}"


class Changed(NamedTuple):
    """A cluster after a change."""

    cluster: ClusterProfile
    change: Change


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
            median[rank] = middle
            devices[rank] = replace(device, host=cluster.devices[rank].host)
    links = replace(of_ranks(cluster, median).network, hosts=cluster.network.hosts)
    return replace(cluster, devices=tuple(devices), network=links)


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


def more_memory(cluster: ClusterProfile, group: DeviceGroup, mebibytes: int) -> Changed:
    """More memory on each rank of a group."""
    added = mebibytes * 2**20
    each = " each" if len(group.ranks) > 1 else ""
    larger = cluster.with_devices(
        lambda device: replace(device, memory_bytes=device.memory_bytes + added), group.ranks
    )
    change = Change("memory", f"+{format_bytes(added, round_up=True)}{each}", *group)
    return Changed(larger, change)


def faster_devices(cluster: ClusterProfile, group: DeviceGroup, factor: float) -> Changed:
    """Passes and optimizer steps of a group `factor` times as fast."""
    faster = cluster.with_devices(lambda device: _slower(device, 1.0 / factor), group.ranks)
    return Changed(faster, Change("device", f"{format_percent(factor - 1.0)} faster", *group))


def faster_network(cluster: ClusterProfile) -> Changed:
    """Collectives in half the time."""
    faster = replace(cluster, network=cluster.network.times(0.5, 0.5))
    return Changed(faster, Change("network", "twice as fast"))


def faster_links(cluster: ClusterProfile, group: DeviceGroup, factor: float) -> Changed:
    """Links of a group `factor` times as fast."""
    network = cluster.network

    def faster(rates: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            rate / factor if rank in group.ranks else rate for rank, rate in enumerate(rates)
        )

    changed = replace(
        network,
        send_seconds_per_byte=faster(network.send_seconds_per_byte),
        receive_seconds_per_byte=faster(network.receive_seconds_per_byte),
        network_seconds_per_byte=faster(network.network_seconds_per_byte),
    )
    both = zip(rate_seconds(changed), rate_seconds(network), strict=True)
    changed = changed.times(*(after / before if before else 1.0 for after, before in both))
    change = Change("link", f"{factor:g} times as fast", *group)
    return Changed(replace(cluster, network=changed), change)


def full_overlap(cluster: ClusterProfile) -> Changed:
    """All communication overlapped with compute, as far as there is compute."""
    change = Change("overlap", f"{cluster.overlap:.2f} to 1")
    return Changed(replace(cluster, overlap=1.0), change)


def larger_batches(cluster: ClusterProfile) -> Changed:
    """Measured curves extended in straight lines to twice the largest batch of each rank."""
    amount = "twice the largest measured (profile with a larger max_batch)"
    larger = cluster.with_devices(lambda device: device.with_points(_extended))
    return Changed(larger, Change("batches", amount))


def smaller_activations(cluster: ClusterProfile, percent_less: int) -> Changed:
    """Activations that take less memory than measured."""
    left = 100 - percent_less

    def smaller(device: DeviceProfile) -> Iterator[BatchPoint]:
        for point in device.points:
            yield replace(
                point,
                activation_bytes=point.activation_bytes * left // 100,
                unit_bytes=tuple(held * left // 100 for held in point.unit_bytes),
                bytes_after_unit=tuple(held * left // 100 for held in point.bytes_after_unit),
            )

    changed = cluster.with_devices(lambda device: device.with_points(smaller))
    amount = f"at most {left} % (activation checkpointing or shorter sequences)"
    return Changed(changed, Change("activations", amount))


def recomputing(cluster: ClusterProfile, ranks: Collection[int]) -> Changed:
    """Ranks that save as much memory as recomputing all units does, at no cost of time."""
    if cluster.model.recomputable_units:
        parts = [(0.0, float(rank in ranks)) for rank in range(cluster.world_size)]
        cluster = with_recomputed_parts(cluster, parts)
    where = format_ranks(tuple(ranks))
    return Changed(cluster, Change("recompute='auto'", f"(recomputation on {where})"))


def more_devices(cluster: ClusterProfile, group: DeviceGroup, copies: int) -> Changed:
    """More ranks like the first one of a group. Collectives keep their measured seconds."""
    ranks = [*range(cluster.world_size), *group.ranks[:1] * copies]
    change = Change("devices", f"+{copies} {group.device}", group.device)
    return Changed(of_ranks(cluster, ranks), change)


def without(cluster: ClusterProfile, ranks: Collection[int]) -> Changed:
    """The cluster without some ranks; at least one must be left."""
    return Changed(without_ranks(cluster, ranks), Change("without", format_ranks(tuple(ranks))))


def with_slower_devices(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """The cluster with passes and optimizer steps that take `factors[rank]` times as long."""
    slower = zip(cluster.devices, factors, strict=True)
    return replace(cluster, devices=tuple(_slower(device, factor) for device, factor in slower))


def _slower(device: DeviceProfile, factor: float) -> DeviceProfile:
    return replace(
        device.with_points(lambda one: (point.times(factor) for point in one.points)),
        optimizer_seconds=device.optimizer_seconds * factor,
        optimizer_latency_seconds=device.optimizer_latency_seconds * factor,
        encode_seconds=tuple(factor * seconds for seconds in device.encode_seconds),
        decode_seconds=tuple(factor * seconds for seconds in device.decode_seconds),
    )


def _extended(device: DeviceProfile) -> Iterator[BatchPoint]:
    """The points, and one more, if there are at least two: see `extended`."""
    yield from device.points
    if len(device.points) < 2:
        return
    batch, unit_bytes = 2 * device.max_batch, cache(device.unit_bytes)

    def of_units(*, ended: bool) -> tuple[int, ...]:
        units = range(len(unit_bytes(device.max_batch)[ended]))
        curves = (lambda size, unit=unit: unit_bytes(size)[ended][unit] for unit in units)
        return tuple(round(extended(device, curve)(batch)) for curve in curves)

    yield BatchPoint(
        batch=batch,
        seconds=extended(device, device.seconds)(batch),
        activation_bytes=round(extended(device, device.activation_bytes)(batch)),
        unit_bytes=of_units(ended=False),
        bytes_after_unit=of_units(ended=True),
    )


def at_worst(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster on which every unmeasured batch takes as long as the next larger measured one.

    A pass never takes less time for more samples, so this is an upper bound. The best plan on it
    uses measured batches, or batches that cost no more.
    """
    return cluster.with_devices(lambda device: device.with_points(_stepped))


def _stepped(device: DeviceProfile) -> Iterator[BatchPoint]:
    """The points, and before each one a point of equal time right after its predecessor."""
    for previous, batch in pairwise([0, *(point.batch for point in device.points)]):
        for size in sorted({previous + 1, batch}):
            yield replace(device.point(size), seconds=device.seconds(batch))
