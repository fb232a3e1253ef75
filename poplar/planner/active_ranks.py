"""The cluster without some of its ranks, and which of its ranks a plan may leave out.

A rank behind a slow link takes part in every collective, so it can cost more than it computes. The
search compares sets of active ranks. `active_sets` orders them by a lower bound on the step, so
that few of them are searched.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from poplar.planner.collective_costs import rate_seconds
from poplar.planner.cost_model import check_plan
from poplar.planner.encoded_costs import least_ratios
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile, DeviceProfile, NetworkProfile

MOST_SETS = 2048
"""Sets of active ranks whose bounds are compared; with more, whole hosts are left out."""
_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


class ActiveSet(NamedTuple):
    """Ranks that may train without the others."""

    bound: float
    """No plan of these ranks has a shorter step, in seconds."""
    left_out: tuple[int, ...]
    """The other ranks, ascending."""


def of_ranks(cluster: ClusterProfile, ranks: Sequence[int]) -> ClusterProfile:
    """The cluster with the devices and links of these ranks, in this order. Collectives keep their
    measured seconds.
    """
    network = cluster.network
    links = replace(
        network,
        send_seconds_per_byte=_of(network.send_seconds_per_byte, ranks),
        receive_seconds_per_byte=_of(network.receive_seconds_per_byte, ranks),
        hosts=tuple(network.hosts[rank] for rank in ranks if network.hosts),
        network_seconds_per_byte=_of(network.network_seconds_per_byte, ranks),
    )
    devices = tuple(cluster.devices[rank] for rank in ranks)
    return replace(cluster, devices=devices, network=links)


def without_ranks(cluster: ClusterProfile, ranks: Collection[int]) -> ClusterProfile:
    """The cluster without some ranks, whose collectives take as long as the other links allow.

    A single rank has no collectives. Ranks of a single host do not use the network between hosts,
    and their collectives take as long as those within hosts, if these were measured.
    """
    if not ranks:
        return cluster
    active = [rank for rank in range(cluster.world_size) if rank not in ranks]
    left, names = of_ranks(cluster, active), _hosts(cluster)
    network, left_on = left.network, Counter(names[rank] for rank in active)
    largest, before = max(left_on.values()), max(Counter(names).values())
    fewer = (1.0 - 1.0 / largest) / (1.0 - 1.0 / before) if largest > 1 else 0.0
    within = tuple(fewer * seconds for seconds in network.within_host_seconds)
    is_measured = 1 < len(left_on) < left.world_size  # otherwise the field is empty
    network = replace(network, within_host_seconds=within if is_measured else ())
    if len(set(network.hosts)) == 1:
        network = _within_one_host(network)
    is_one_host = within and len(left_on) == 1 < len(set(names))
    if left.world_size == 1 or is_one_host:
        # Nothing that was measured between hosts concerns these ranks.
        reduced, gathered = within or (0.0, 0.0)
        network = replace(
            network,
            reduce_scatter_seconds=reduced,
            all_gather_seconds=gathered,
            synchronization_seconds=_NO_RESIDUALS,
            step_seconds=_NO_RESIDUALS,
            collective_latency_seconds=(),
        )
    else:
        both = zip(rate_seconds(network), rate_seconds(cluster.network), strict=True)
        fewer = (1.0 - 1.0 / left.world_size) / (1.0 - 1.0 / cluster.world_size)
        network = network.times(*(after / before if before else fewer for after, before in both))
    return replace(left, network=network)


def active_part(cluster: ClusterProfile, plan: Plan) -> tuple[ClusterProfile, Plan]:
    """The cluster and the plan of the plan's active ranks alone.

    Raises:
        ValueError: see `check_plan`.
    """
    check_plan(cluster, plan)
    if not plan.left_out:
        return cluster, plan
    return without_ranks(cluster, plan.left_out), plan.of_active_ranks()


def active_sets(
    cluster: ClusterProfile,
    groups: Sequence[Sequence[int]],
    *,
    global_batch: int,
    max_micro_batch: int,
    may_factor: bool,
) -> list[ActiveSet]:
    """Sets of ranks that may be active, by ascending bound, without the set of all ranks.

    Of equal devices on a host, the fastest ones are active; if these are more than `MOST_SETS`
    sets, all ranks of a host or none, of equal hosts the first ones. If these are still too many,
    hosts are left out in the order of their samples per second over the seconds of their links.

    Args:
        cluster: all ranks.
        groups: ranks with equal devices and links, up to noise.
        global_batch: samples of a step.
        max_micro_batch: the largest micro-batch.
        may_factor: gradients of linear layers may be sent as factors, which may take no time.
    """
    rates = [_samples_per_second(device, max_micro_batch) for device in cluster.devices]
    network, names, model = cluster.network, _hosts(cluster), cluster.model
    linear = sum(layer.numel for layer in model.linear_layers) if may_factor else 0
    whole = max(0.0, 1.0 - linear / model.numel) if linear else 1.0
    """The part of the model that is never sent as factors."""
    measured = whole * network.reduce_scatter_seconds, network.all_gather_seconds
    reduced, gathered = (
        ratio * seconds / by_rates if by_rates else 0.0
        for ratio, seconds, by_rates in zip(
            least_ratios(cluster), measured, rate_seconds(network), strict=True
        )
    )

    def bound(active: Sequence[int]) -> float:
        compute = global_batch / math.fsum(rates[rank] for rank in active)
        sending, receiving = _least_seconds(network, active)
        if network.within_host_seconds and len({names[rank] for rank in active}) == 1:
            sending = receiving = 0.0

        def exposed(stage: int) -> float:
            # At stage 0, no rank needs the gradient of a layer that is sent as factors.
            gather = gathered * receiving * (whole if stage == 0 else 1.0)
            communication = reduced * sending + gather
            overhead = max(cluster.devices[rank].step_overhead_seconds[stage] for rank in active)
            residual = min(0.0, network.synchronization_seconds[stage])
            residual += min(0.0, network.step_seconds[stage] + overhead)
            overlapped = min(cluster.overlap * communication, compute)
            return max(0.0, communication - overlapped + residual)

        return compute + min(map(exposed, range(len(STRATEGIES))))

    found = []
    for active in _sets(cluster, groups, rates):
        if 0 < len(active) < cluster.world_size:
            left_out = sorted(set(range(cluster.world_size)) - set(active))
            found.append(ActiveSet(bound(active), tuple(left_out)))
    return sorted(found)


def _hosts(cluster: ClusterProfile) -> Sequence[object]:
    """By rank, the number or the name of its host."""
    return cluster.network.hosts or [device.host for device in cluster.devices]


def _sets(
    cluster: ClusterProfile, groups: Sequence[Sequence[int]], rates: Sequence[float]
) -> Iterator[list[int]]:
    """Ranks that are active together: the first blocks of each chain of blocks of ranks."""
    of_rank = {rank: number for number, group in enumerate(groups) for rank in group}
    names = _hosts(cluster)
    hosts, alike = defaultdict(list), defaultdict(list)
    for rank in sorted(range(cluster.world_size), key=lambda rank: -rates[rank]):
        hosts[names[rank]].append(rank)
        alike[names[rank], of_rank[rank]].append([rank])
    chains = list(alike.values())
    if math.prod(len(chain) + 1 for chain in chains) > MOST_SETS:
        equal_hosts = defaultdict(list)
        for ranks in hosts.values():
            equal_hosts[tuple(of_rank[rank] for rank in ranks)].append(ranks)
        chains = list(equal_hosts.values())
    if math.prod(len(chain) + 1 for chain in chains) > MOST_SETS:
        slowest = cluster.network.send_seconds_per_byte

        def value(ranks: Sequence[int]) -> float:
            return math.fsum(rates[r] for r in ranks) / (max(slowest[r] for r in ranks) or 1.0)

        chains = [sorted(hosts.values(), key=value, reverse=True)]
    for counts in product(*(range(len(chain) + 1) for chain in chains)):
        firsts = (chain[:count] for chain, count in zip(chains, counts, strict=True))
        yield [rank for first in firsts for ranks in first for rank in ranks]


def _least_seconds(network: NetworkProfile, active: Sequence[int]) -> tuple[float, float]:
    """A lower bound, under any shares, on `rate_seconds` of these ranks alone.

    A link carries what its rank, or its host, does not own once, and what it owns once for each
    other one, in opposite directions of a reduce-scatter and of an all-gather.
    """
    hosts = {network.hosts[rank] for rank in active} if network.hosts else active
    others = len(hosts) - 1
    if not others:
        return 0.0, 0.0
    shared = network.network_seconds_per_byte
    sending = _of(shared or network.send_seconds_per_byte, active)
    receiving = _of(shared or network.receive_seconds_per_byte, active)

    def least(leaving: Sequence[float], arriving: Sequence[float]) -> float:
        both = ((out, others * into) for out, into in zip(leaving, arriving, strict=True))
        return max(out * into / (out + into) if out + into else 0.0 for out, into in both)

    return least(sending, receiving), least(receiving, sending)


def _samples_per_second(device: DeviceProfile, max_micro_batch: int) -> float:
    """An upper bound: the curves are straight between their points."""
    overhead = min(0.0, *device.pass_overhead_seconds)
    best = 0.0
    for points in (device.points, device.recomputed_points):
        whole = replace(device, points=points or device.points, recomputed_points=())
        for batch in {1, *(min(point.batch, max_micro_batch) for point in points)}:
            seconds = whole.seconds(batch) + overhead
            best = max(best, batch / seconds if seconds > 0.0 else math.inf)
    return best


def _within_one_host(network: NetworkProfile) -> NetworkProfile:
    """The network of ranks of one host, whose links are known apart from the network or not."""

    def within(rates: Sequence[float]) -> tuple[float, ...]:
        between = network.network_seconds_per_byte or (0.0,) * len(rates)
        return tuple(max(0.0, rate - part) for rate, part in zip(rates, between, strict=True))

    return replace(
        network,
        send_seconds_per_byte=within(network.send_seconds_per_byte),
        receive_seconds_per_byte=within(network.receive_seconds_per_byte),
        hosts=(),
        network_seconds_per_byte=(),
        transport=None,
    )


def _of(values: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
    return tuple(values[rank] for rank in ranks if values)
