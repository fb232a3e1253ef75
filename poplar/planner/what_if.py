"""What-if questions: a search that differs in one respect, for `explain`, `NoPlanFits` and reports.

Each change is one function: it returns the changed cluster and a description of the change. What is
measured and not changed stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from poplar.formatting import format_bytes, format_ranks, format_signed_percent
from poplar.plan import STRATEGIES, Plan
from poplar.planner.baselines import shortfall_rule
from poplar.planner.cost_model import StageCosts
from poplar.planner.device_groups import DeviceGroup
from poplar.planner.search import ALL_STAGES, search
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile

_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A cluster, and the other arguments of `search`."""

    cluster: ClusterProfile
    global_batch: int
    stages: Sequence[int] = ALL_STAGES
    policy: str = "exact"
    max_micro_batch: int | None = None

    def fitting_stage(self) -> int | None:
        """The highest requested stage at which a plan fits, without a search."""
        rule = shortfall_rule(self.policy, self.global_batch)
        stages = sorted(self.stages, reverse=True)
        return next((s for s in stages if rule(StageCosts(self.cluster, s)) is None), None)


def evaluate(scenario: Scenario) -> Plan | ValueError:
    """The fastest plan, or the error that says why there is none."""
    try:
        return search(
            scenario.cluster,
            global_batch=scenario.global_batch,
            stages=scenario.stages,
            policy=scenario.policy,
            max_micro_batch=scenario.max_micro_batch,
        )
    except ValueError as error:
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of a scenario, and what the fastest plan gains from it."""

    what: str
    """For example `"memory"`, `"device"`, `"network"`, `"overlap"` or `"batches"`."""
    ranks: tuple[int, ...] = ()
    """The ranks whose device changes; empty: something that all ranks share."""
    device: str = ""
    """The name of their devices; empty: something that all ranks share."""
    amount: str
    """As text: "+8.00 GiB each"."""
    gain: float = 0.0
    """Fraction by which samples per second grow: 0.12 is 12 % more."""
    stage: int | None = None
    """Of the plan after the change."""

    def __str__(self) -> str:
        return f"{self.whose}: {self.amount} gives {format_signed_percent(self.gain)}"

    @property
    def whose(self) -> str:
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


def improvements(cluster: ClusterProfile, groups: Sequence[DeviceGroup]) -> Iterator[Changed]:
    """Changes of speed that `explain` tries: each group of devices, and the network."""
    for group in groups:
        yield faster_devices(cluster, group, 1.25)
    network = cluster.network
    if cluster.world_size > 1 and network.reduce_scatter_seconds + network.all_gather_seconds > 0:
        yield faster_network(cluster, 2)
        if cluster.overlap < 1.0:
            yield full_overlap(cluster)


def more_memory(cluster: ClusterProfile, group: DeviceGroup, added_bytes: int) -> Changed:
    """More memory on each rank of a group."""
    each = " each" if len(group.ranks) > 1 else ""
    return Changed(
        _with_devices(
            cluster,
            lambda device: replace(device, memory_bytes=device.memory_bytes + added_bytes),
            group.ranks,
        ),
        Change(
            what="memory",
            ranks=group.ranks,
            device=group.device,
            amount=f"+{format_bytes(added_bytes, round_up=True)}{each}",
        ),
    )


def faster_devices(cluster: ClusterProfile, group: DeviceGroup, factor: float) -> Changed:
    """Passes and optimizer steps of a group `factor` times as fast."""
    amount = f"{100 * factor - 100:.0f} % faster"
    return Changed(
        _with_devices(cluster, lambda device: _slower(device, 1.0 / factor), group.ranks),
        Change(what="device", ranks=group.ranks, device=group.device, amount=amount),
    )


def faster_network(cluster: ClusterProfile, factor: int) -> Changed:
    """Collectives `factor` times as fast."""
    network = replace(
        cluster.network,
        reduce_scatter_seconds=cluster.network.reduce_scatter_seconds / factor,
        all_gather_seconds=cluster.network.all_gather_seconds / factor,
    )
    amount = "twice as fast" if factor == 2 else f"{factor} times as fast"
    return Changed(replace(cluster, network=network), Change(what="network", amount=amount))


def full_overlap(cluster: ClusterProfile) -> Changed:
    """All communication overlapped with compute, as far as there is compute."""
    amount = f"{cluster.overlap:.2f} to 1"
    return Changed(replace(cluster, overlap=1.0), Change(what="overlap", amount=amount))


def larger_batches(cluster: ClusterProfile) -> Changed:
    """Measured curves extended in straight lines to twice the largest batch of each rank."""
    amount = "twice the largest measured (profile with a larger max_batch)"
    return Changed(_with_devices(cluster, _extended), Change(what="batches", amount=amount))


def smaller_activations(cluster: ClusterProfile, percent_less: int) -> Changed:
    """Activations that take less memory than measured."""

    def smaller(device: DeviceProfile) -> DeviceProfile:
        points = (
            replace(point, activation_bytes=point.activation_bytes * (100 - percent_less) // 100)
            for point in device.points
        )
        return replace(device, points=tuple(points))

    left = f"at most {100 - percent_less} % (activation checkpointing or shorter sequences)"
    return Changed(_with_devices(cluster, smaller), Change(what="activations", amount=left))


def more_devices(cluster: ClusterProfile, group: DeviceGroup, copies: int) -> Changed:
    """More ranks like the first one of a group, as the last ranks.

    For questions of memory: collectives keep their measured seconds.
    """
    rank, network = group.ranks[0], cluster.network
    send, receive = network.send_seconds_per_byte, network.receive_seconds_per_byte
    larger = replace(
        cluster,
        devices=cluster.devices + (cluster.devices[rank],) * copies,
        network=replace(
            network,
            send_seconds_per_byte=send + (send[rank],) * copies,
            receive_seconds_per_byte=receive + (receive[rank],) * copies,
        ),
    )
    amount = f"+{copies} {group.device}"
    return Changed(larger, Change(what="devices", device=group.device, amount=amount))


def without(cluster: ClusterProfile, ranks: Collection[int]) -> Changed:
    """The cluster without some ranks; at least one must be left.

    The time of collectives among the others follows from the links: the slowest one bounds it, and
    each of `n` ranks moves `(n - 1) / n` of the buffer. A single rank has no collectives.
    """
    left = [rank for rank in range(cluster.world_size) if rank not in ranks]
    smaller = replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in left),
        network=_network_among(cluster.network, left),
    )
    return Changed(smaller, Change(what="without", amount=format_ranks(tuple(ranks))))


def with_slower_devices(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """The cluster with passes and optimizer steps that take `factors[rank]` times as long."""
    slower = zip(cluster.devices, factors, strict=True)
    return replace(cluster, devices=tuple(_slower(device, factor) for device, factor in slower))


def _with_devices(
    cluster: ClusterProfile,
    function: Callable[[DeviceProfile], DeviceProfile],
    ranks: Collection[int] | None = None,
) -> ClusterProfile:
    """The cluster with `function` applied to the devices of `ranks`; None: to all."""
    changed = frozenset(range(cluster.world_size) if ranks is None else ranks)
    devices = (
        function(device) if rank in changed else device
        for rank, device in enumerate(cluster.devices)
    )
    return replace(cluster, devices=tuple(devices))


def _slower(device: DeviceProfile, factor: float) -> DeviceProfile:
    if factor == 1.0:
        return device
    return replace(
        device,
        points=tuple(point.times(factor) for point in device.points),
        optimizer_seconds=device.optimizer_seconds * factor,
        optimizer_latency_seconds=device.optimizer_latency_seconds * factor,
    )


def _extended(device: DeviceProfile) -> DeviceProfile:
    """One more point, on the steeper of the last segment and the line from first to last point."""
    if len(device.points) < 2:
        return device
    batches = first, before, last = [device.points[at].batch for at in (0, -2, -1)]

    def extrapolated(curve: Callable[[int], float]) -> float:
        low, near, end = map(curve, batches)
        return end + last * max((end - near) / (last - before), (end - low) / (last - first))

    point = BatchPoint(
        batch=2 * last,
        seconds=extrapolated(device.seconds),
        activation_bytes=round(extrapolated(device.activation_bytes)),
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
