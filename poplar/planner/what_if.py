"""What-if questions: a search that differs in one respect, for `explain`, `NoPlanFits` and reports.

Each change is one function: it returns the changed scenario and a description of the change. What
is measured and not changed stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from poplar.formatting import format_bytes, format_ranks, format_signed_percent
from poplar.plan import STRATEGIES, Plan
from poplar.planner.device_groups import DeviceGroup
from poplar.planner.search import ALL_STAGES, search
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile

_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The arguments of a search."""

    cluster: ClusterProfile
    global_batch: int
    stages: Sequence[int] = ALL_STAGES
    policy: str = "exact"
    max_micro_batch: int | None = None


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


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a scenario, and what the fastest plan gains from it."""

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
    """A scenario after a change."""

    scenario: Scenario
    change: Change


def other_stage(scenario: Scenario, stage: int) -> Changed:
    """Only this stage is requested."""
    return Changed(replace(scenario, stages=(stage,)), Change("stage", str(stage)))


def other_policy(scenario: Scenario, policy: str) -> Changed:
    """Another policy is requested."""
    return Changed(replace(scenario, policy=policy), Change("policy", policy))


def more_memory(scenario: Scenario, group: DeviceGroup, mebibytes: int) -> Changed:
    """More memory on each rank of a group."""
    added = mebibytes * 2**20
    each = " each" if len(group.ranks) > 1 else ""

    def larger(device: DeviceProfile) -> DeviceProfile:
        return replace(device, memory_bytes=device.memory_bytes + added)

    change = Change("memory", f"+{format_bytes(added, round_up=True)}{each}", *group)
    return Changed(_with_devices(scenario, larger, group.ranks), change)


def faster_devices(scenario: Scenario, group: DeviceGroup, factor: float) -> Changed:
    """Passes and optimizer steps of a group `factor` times as fast."""
    change = Change("device", f"{100 * factor - 100:.0f} % faster", *group)
    faster = _with_devices(scenario, lambda device: _slower(device, 1.0 / factor), group.ranks)
    return Changed(faster, change)


def faster_network(scenario: Scenario) -> Changed:
    """Collectives in half the time."""
    network = scenario.cluster.network
    faster = replace(
        network,
        reduce_scatter_seconds=network.reduce_scatter_seconds / 2,
        all_gather_seconds=network.all_gather_seconds / 2,
    )
    return Changed(_with(scenario, network=faster), Change("network", "twice as fast"))


def full_overlap(scenario: Scenario) -> Changed:
    """All communication overlapped with compute, as far as there is compute."""
    change = Change("overlap", f"{scenario.cluster.overlap:.2f} to 1")
    return Changed(_with(scenario, overlap=1.0), change)


def larger_batches(scenario: Scenario) -> Changed:
    """Measured curves extended in straight lines to twice the largest batch of each rank."""
    amount = "twice the largest measured (profile with a larger max_batch)"
    return Changed(_with_devices(scenario, _extended), Change("batches", amount))


def smaller_activations(scenario: Scenario, percent_less: int) -> Changed:
    """Activations that take less memory than measured."""
    left = 100 - percent_less

    def smaller(device: DeviceProfile) -> DeviceProfile:
        points = (
            replace(point, activation_bytes=point.activation_bytes * left // 100)
            for point in device.points
        )
        return replace(device, points=tuple(points))

    amount = f"at most {left} % (activation checkpointing or shorter sequences)"
    return Changed(_with_devices(scenario, smaller), Change("activations", amount))


def more_devices(scenario: Scenario, group: DeviceGroup, copies: int) -> Changed:
    """More ranks like the first one of a group. Collectives keep their measured seconds."""
    ranks = [*range(scenario.cluster.world_size), *group.ranks[:1] * copies]
    change = Change("devices", f"+{copies} {group.device}", group.device)
    return Changed(_with_ranks(scenario, ranks), change)


def without(scenario: Scenario, ranks: Collection[int]) -> Changed:
    """The cluster without some ranks; at least one must be left."""
    left = [rank for rank in range(scenario.cluster.world_size) if rank not in ranks]
    smaller = _with_ranks(scenario, left)
    network = _scaled(smaller.cluster.network, scenario.cluster.network)
    return Changed(_with(smaller, network=network), Change("without", format_ranks(tuple(ranks))))


def with_slower_devices(cluster: ClusterProfile, factors: Sequence[float]) -> ClusterProfile:
    """The cluster with passes and optimizer steps that take `factors[rank]` times as long."""
    slower = zip(cluster.devices, factors, strict=True)
    return replace(cluster, devices=tuple(_slower(device, factor) for device, factor in slower))


def _with(scenario: Scenario, **changes: Any) -> Scenario:
    return replace(scenario, cluster=replace(scenario.cluster, **changes))


def _with_devices(
    scenario: Scenario,
    function: Callable[[DeviceProfile], DeviceProfile],
    ranks: Collection[int] | None = None,
) -> Scenario:
    """The scenario with `function` applied to the devices of `ranks`; None: to all."""
    devices = list(scenario.cluster.devices)
    changed: dict[int, DeviceProfile] = {}
    for rank in range(len(devices)) if ranks is None else ranks:
        device = devices[rank]
        if id(device) not in changed:  # large clusters repeat few devices
            changed[id(device)] = function(device)
        devices[rank] = changed[id(device)]
    return _with(scenario, devices=tuple(devices))


def _with_ranks(scenario: Scenario, ranks: Sequence[int]) -> Scenario:
    """The scenario with the devices and links of these ranks, in this order."""
    network = scenario.cluster.network
    links = replace(
        network,
        send_seconds_per_byte=tuple(network.send_seconds_per_byte[rank] for rank in ranks),
        receive_seconds_per_byte=tuple(network.receive_seconds_per_byte[rank] for rank in ranks),
    )
    devices = tuple(scenario.cluster.devices[rank] for rank in ranks)
    return _with(scenario, devices=devices, network=links)


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


def _scaled(network: NetworkProfile, measured: NetworkProfile) -> NetworkProfile:
    """The network with the time of collectives among fewer ranks than `measured`.

    The slowest link bounds it, and each of `n` ranks moves `(n - 1) / n` of the buffer. A single
    rank has no collectives.
    """
    ranks, ranks_before = (len(of.send_seconds_per_byte) for of in (network, measured))
    slowest, slowest_before = (
        max(*one.send_seconds_per_byte, *one.receive_seconds_per_byte)
        for one in (network, measured)
    )
    scale = slowest / slowest_before if slowest_before else 1.0
    scale *= (ranks - 1) / ranks * ranks_before / max(1, ranks_before - 1)
    if ranks == 1:
        network = replace(
            network, synchronization_seconds=_NO_RESIDUALS, step_seconds=_NO_RESIDUALS
        )
    return replace(
        network,
        reduce_scatter_seconds=scale * measured.reduce_scatter_seconds,
        all_gather_seconds=scale * measured.all_gather_seconds,
    )
