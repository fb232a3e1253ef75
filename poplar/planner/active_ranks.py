"""The cluster of a plan's active ranks, without those that it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from poplar.planner.collective_costs import rate_seconds
from poplar.planner.cost_model import check_plan
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile, NetworkProfile

_NO_RESIDUALS = (0.0,) * len(STRATEGIES)


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
    left, names = of_ranks(cluster, active), hosts_of(cluster)
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


def hosts_of(cluster: ClusterProfile) -> Sequence[object]:
    """By rank, the number or the name of its host."""
    return cluster.network.hosts or [device.host for device in cluster.devices]


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
