"""Collectives over several hosts: the cost model is the traffic of `host_traffic` over rates."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import planning_oracle
import pytest
from all_ranks import search
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from poplar.hardware.cluster_file import DeviceEntry, HostEntry
from poplar.hardware.simulated_cluster import network_profile
from poplar.planner.collective_costs import CollectiveCosts
from poplar.planner.communication_schedule import Synchronization
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import Caps, rank_memory
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import predict
from poplar.planner.shard_allocation import ShareProblem
from poplar.planner.simple_plans import PREFERENCE
from poplar.values.host_traffic import link_traffic, network_traffic
from poplar.values.profile import ModelProfile, NetworkProfile

MODEL = ModelProfile(unit_numels=(10**9,), param_bytes=2, wire_bytes=4)


def random_hosts(draw: random.Random) -> tuple[int, ...]:
    """By rank, the number of its host; hosts may be interleaved."""
    hosts = [host for host in range(draw.randint(2, 4)) for _ in range(draw.randint(1, 3))]
    draw.shuffle(hosts)
    return tuple(hosts)


def random_shares(draw: random.Random, ranks: int) -> tuple[float, ...]:
    parts = [draw.choice((0.0, 1.0, draw.random())) for _ in range(ranks)]
    return tuple(part / sum(parts) for part in parts) if any(parts) else (1 / ranks,) * ranks


def random_network(draw: random.Random, hosts: tuple[int, ...]) -> NetworkProfile:
    """Rates of 0 or 1 s per byte and more within hosts, and other ones of their networks."""
    network = {host: draw.choice((0.5, 1.0, 4.0)) for host in set(hosts)}
    link = {host: draw.choice((0.0, 0.1, 1.0)) for host in set(hosts)}
    rates = tuple(network[host] + link[host] for host in hosts)
    return NetworkProfile(
        reduce_scatter_seconds=1.0,
        all_gather_seconds=0.5,
        send_seconds_per_byte=rates,
        receive_seconds_per_byte=rates,
        hosts=hosts,
        network_seconds_per_byte=tuple(network[host] for host in hosts),
    )


def by_traffic(network: NetworkProfile, shares: tuple[float, ...]) -> float:
    """The busiest link within a host and the busiest network, one after the other."""
    hosts = sorted(set(network.hosts))
    ranks = [[rank for rank, own in enumerate(network.hosts) if own == host] for host in hosts]
    owned = [[shares[rank] for rank in members] for members in ranks]
    slow = [network.network_seconds_per_byte[members[0]] for members in ranks]
    total = [network.send_seconds_per_byte[members[0]] for members in ranks]
    within = max(
        (rate - network_rate) * link.busiest
        for rate, network_rate, links in zip(
            total, slow, link_traffic(owned, hierarchical=True), strict=True
        )
        for link in links
    )
    between = max(
        rate * one.busiest
        for rate, one in zip(slow, network_traffic(owned, hierarchical=True), strict=True)
    )
    return within + between


@given(seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_two_levels_follow_the_traffic_under_any_shares(seed: int) -> None:
    draw = random.Random(seed)
    network = random_network(draw, random_hosts(draw))
    costs, ranks = CollectiveCosts.of(network), len(network.hosts)
    even, shares = (1 / ranks,) * ranks, random_shares(draw, ranks)
    assert costs.reduce_scatter.seconds(even) == pytest.approx(1.0)
    ratio = by_traffic(network, shares) / by_traffic(network, even)
    assert costs.reduce_scatter.seconds(shares) == pytest.approx(ratio)
    assert costs.all_gather.seconds(shares) == pytest.approx(0.5 * ratio)


def test_a_measured_hierarchical_transport_is_bound_by_the_networks() -> None:
    """Its rates are those of whole hosts, however many ranks own a host's share."""
    network = NetworkProfile(
        reduce_scatter_seconds=1.0,
        all_gather_seconds=1.0,
        send_seconds_per_byte=(1.0,) * 8,
        receive_seconds_per_byte=(1.0,) * 8,
        hosts=(0,) * 4 + (1,) * 4,
    )
    reduce_scatter = CollectiveCosts.of(network).reduce_scatter
    assert reduce_scatter.seconds((1.0, *(0.0,) * 7)) == pytest.approx(2.0)
    assert reduce_scatter.seconds((0.25,) * 4 + (0.0,) * 4) == pytest.approx(2.0)
    flat = CollectiveCosts.of(dataclasses.replace(network, hosts=())).reduce_scatter
    assert flat.seconds((1.0, *(0.0,) * 7)) == pytest.approx(8.0)


def on_hosts(seed: int) -> tuple[random.Random, StageCosts]:
    """A random cluster whose transport is hierarchical."""
    draw = random.Random(seed)
    hosts = random_hosts(draw)
    cluster = planning_oracle.random_cluster(draw, len(hosts), 1)
    network = random_network(draw, hosts)
    if draw.random() < 0.3:
        network = dataclasses.replace(network, network_seconds_per_byte=())
    return draw, StageCosts(dataclasses.replace(cluster, network=network), 1)


@given(seed=st.integers(0, 2**32))
def test_no_shares_are_faster_than_those_of_the_linear_program(seed: int) -> None:
    draw, costs = on_hosts(seed)
    ranks = costs.cluster.world_size
    upper = [draw.choice((1.0, 0.5)) for _ in range(ranks)]
    problem = ShareProblem(costs, upper)
    assume(problem.is_feasible)
    step = [Synchronization(draw.random(), 0.0)]
    found = problem.cheapest(costs.counted(step))

    def seconds(shares: tuple[float, ...]) -> float:
        parts = costs.synchronizations_seconds(step, costs.communication(shares))
        return sum(parts) + costs.tail_seconds(shares)

    assert found.seconds == pytest.approx(seconds(found.shares), rel=1e-6, abs=1e-9)
    least, most = problem.least_communication(), problem.most_communication()
    for _ in range(20):
        shares = random_shares(draw, ranks)
        if all(share <= bound for share, bound in zip(shares, upper, strict=True)):
            assert seconds(shares) >= found.seconds * (1 - 1e-9)
            reduce = costs.communication(shares).reduce
            assert least.reduce * (1 - 1e-9) <= reduce <= most.reduce * (1 + 1e-9)


def host(ranks: int, gigabytes: float = 10.0) -> HostEntry:
    return HostEntry(
        device=(DeviceEntry(gpu="T4", count=ranks),),
        link_gb_per_s=gigabytes,
        network_gbit_per_s=8.0,
    )


@pytest.mark.parametrize(
    ("ranks_by_host", "calls"), [((1,), 0), ((4,), 1), ((1, 1, 1), 1), ((2, 2), 2), ((1, 3), 2)]
)
def test_each_native_call_has_a_latency(ranks_by_host: tuple[int, ...], calls: int) -> None:
    """One call per unit and level, whatever the number of ranks."""
    few = dataclasses.replace(MODEL, unit_numels=(64,))
    many = dataclasses.replace(MODEL, unit_numels=(64,) * 101)
    hosts = [host(ranks, gigabytes=1e9) for ranks in ranks_by_host]
    seconds = [network_profile(hosts, model).reduce_scatter_seconds for model in (few, many)]
    assert seconds[1] - seconds[0] == pytest.approx(100 * calls * 50e-6, rel=0.1)


def test_estimated_profiles_name_hosts_only_if_the_transport_is_hierarchical() -> None:
    assert network_profile([host(2), host(1)], MODEL).hosts == (0, 0, 1)
    assert network_profile([host(1), host(1)], MODEL).hosts == ()
    assert network_profile([host(4)], MODEL).hosts == ()


@pytest.mark.parametrize("keeps", ["step", "freed"])
def test_a_hierarchical_transport_needs_memory_for_one_collective_on_its_host(keeps: str) -> None:
    draw = random.Random(3)
    flat = planning_oracle.random_cluster(draw, 4, 2)
    model = dataclasses.replace(
        flat.model,
        unit_numels=(10**7,) * len(flat.model.unit_numels),
        merged_buffers=((10**6,) * 10,) * len(flat.model.unit_numels),
    )
    network = dataclasses.replace(flat.network, receive_buffers=keeps)
    flat = dataclasses.replace(flat, model=model, network=network)
    network = dataclasses.replace(network, hosts=(0, 0, 1, 1))
    over_hosts = dataclasses.replace(flat, network=network)

    def more(share: float) -> float:
        with_hosts, without = rank_memory(over_hosts, 2, 0), rank_memory(flat, 2, 0)
        return with_hosts.needed(Caps(0), share) - without.needed(Caps(0), share)

    # Devices also allocate the sums of half the bucket before the first call, in fp32 and as sent.
    sums = (4 + model.wire_bytes) / 2 if keeps == "freed" else 0.0
    needed = 2 * model.wire_bytes + sums + model.param_bytes
    assert more(0.0) == pytest.approx(needed * 10**6)
    # They receive the sums of their own slice from the other host.
    received = 0.5 * model.wire_bytes if keeps == "freed" else 0.0
    assert more(0.5) == pytest.approx((needed + received) * 10**6)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_policy_is_faster_than_the_exact_one_over_hosts(seed: int) -> None:
    cluster = on_hosts(seed)[1].cluster
    for stage in (1, 2, 3):
        with contextlib.suppress(NoPlanFits):
            exact = search(cluster, global_batch=8, stages=(stage,))
            for policy in ("even", "paper"):
                other = search(cluster, global_batch=8, stages=(stage,), policy=policy)
                limit = (1 + PREFERENCE) * predict(cluster, other).step_seconds
                assert predict(cluster, exact).step_seconds <= limit


# Latency


def test_a_measurement_contains_the_latencies_of_its_buffers():
    network = NetworkProfile(
        reduce_scatter_seconds=0.2,
        all_gather_seconds=0.1,
        send_seconds_per_byte=(1e-9,) * 2,
        receive_seconds_per_byte=(1e-9,) * 2,
        collective_latency_seconds=(0.03, 0.02),
    )
    cost = CollectiveCosts.of(network, buffers=4).reduce_scatter
    assert cost.seconds((0.5, 0.5)) == pytest.approx(0.2)
    assert (cost.latency, cost.bandwidth_part) == (0.03, pytest.approx(1.0 - 4 * 0.03 / 0.2))
