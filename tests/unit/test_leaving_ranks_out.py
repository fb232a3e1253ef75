"""Plans that leave ranks out: adding a rank or a host never makes the predicted step longer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import clusters
import pytest
from clusters import cluster_of, network_of
from subset import choose

from poplar.hardware.simulated_cluster import network_profile
from poplar.planner.active_ranks import active_sets, without_ranks
from poplar.planner.explain import explain
from poplar.planner.prediction import describe, predict, predicted_seconds
from poplar.planner.search import NoPlanFits, alternatives, search
from poplar.planner.what_if import device_groups
from poplar.simulator.step_simulation import simulate
from poplar.values.plan import ALL_STAGES, Plan, UnitPlan
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    LinearLayer,
    ModelProfile,
)

MODEL = ModelProfile(unit_numels=(1_000_000,) * 4, unit_names=("a", "b", "c", "d"), param_bytes=2.0)


def device(speed: float, **changes: Any) -> DeviceProfile:
    """Memory of 10 GB holds everything."""
    own = {"name": f"{speed:g}", "memory": 10**10, "optimizer_seconds": 0.01 / speed, **changes}
    return clusters.device(speed, latency=0.3, sample=1.0, **own)


def flat_cluster(speeds, rates, seconds_per_rate: float = 1.0) -> ClusterProfile:
    """Ranks whose links take so many seconds for the whole model."""
    n = len(speeds)
    measured = seconds_per_rate * max(rates) * (n - 1) / n
    return cluster_of(
        *map(device, speeds), model=MODEL, network=network_of(rates, measured, measured)
    )


def random_flat_cluster(draw: random.Random) -> ClusterProfile:
    ranks = draw.randint(2, 4)
    kinds = [(draw.choice((1.0, 2.0, 4.0)), draw.choice((0.01, 0.1, 1.0, 30.0))) for _ in range(3)]
    speeds, rates = zip(*(draw.choice(kinds) for _ in range(ranks)), strict=True)
    return flat_cluster(speeds, rates)


def random_host(draw: random.Random, ranks: int) -> SimpleNamespace:
    """What `network_profile` reads of a host."""
    link, network = draw.choice((1e8, 1e9)), draw.choice((1e6, 1e7, 1e8))
    return SimpleNamespace(ranks=ranks, link_bytes_per_s=link, network_bytes_per_s=network)


def random_hosts(draw: random.Random) -> ClusterProfile:
    hosts = [random_host(draw, draw.randint(1, 2)) for _ in range(draw.randint(2, 3))]
    if sum(host.ranks for host in hosts) == len(hosts):
        hosts[0].ranks = 2
    devices = tuple(
        device(draw.choice((1.0, 4.0)), host=str(number))
        for number, host in enumerate(hosts)
        for _ in range(host.ranks)
    )
    return ClusterProfile(devices=devices, model=MODEL, network=network_profile(hosts, MODEL))


def step_seconds(cluster: ClusterProfile, **options) -> float:
    plan = search(cluster, global_batch=12, preference=0.0, **options)
    assert plan.prediction["step_seconds"] == pytest.approx(predict(cluster, plan).step_seconds)
    return plan.prediction["step_seconds"]


@pytest.mark.parametrize("make", [random_flat_cluster, random_hosts])
@pytest.mark.parametrize("seed", range(choose(quick=3, full=150)))
def test_another_rank_never_makes_the_step_longer(make, seed):
    draw = random.Random(seed)
    cluster = make(draw)
    stages = (draw.choice((0, 1, 2, 3)),)
    step = step_seconds(cluster, stages=stages)
    hosts = cluster.network.hosts
    removed = [(rank,) for rank in range(cluster.world_size)]
    removed += [tuple(r for r, own in enumerate(hosts) if own == host) for host in set(hosts)]
    for ranks in removed:
        smaller = without_ranks(cluster, ranks)
        assert step <= step_seconds(smaller, stages=stages) * (1.0 + 1e-9), ranks


def uneven_curve(draw: random.Random, points: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
    """Passes with steps, of which some are faster than smaller ones."""
    return tuple(
        dataclasses.replace(point, seconds=point.seconds * draw.choice((0.6, 1.0, 1.0, 1.7)))
        for point in points
    )


def with_recomputation(draw: random.Random, one: DeviceProfile) -> DeviceProfile:
    """Memory for a few samples, or for many with recomputation, which takes longer."""
    slower = draw.choice((1.05, 1.5))
    points = tuple(
        dataclasses.replace(point, seconds=slower * point.seconds, activation_bytes=point.batch)
        for point in one.points
    )
    known = one.points[: draw.randint(1, len(points))]
    return dataclasses.replace(
        one, points=known, recomputed_points=points, memory_bytes=draw.choice((90, 10_000)) * 10**6
    )


def hard_to_bound(draw: random.Random, cluster: ClusterProfile):
    """The cluster with steps in its curves, recomputation, linear layers and residuals. These are
    often negative: then communication costs less than its seconds.
    """

    def residuals() -> tuple[float, ...]:
        return tuple(draw.choice((0.0, -0.2, 0.2, -2.0)) for _ in range(4))

    layers = tuple(
        LinearLayer(name=f"layer {unit}", unit=unit, outputs=1000, inputs=1000, rows_per_sample=1)
        for unit in range(draw.choice((0, 2, 4)))
    )
    overlap = draw.choice((0.0, 0.5, 1.0))
    sent = residuals(), residuals()
    recomputing = partial(with_recomputation, draw) if draw.random() < 0.5 else lambda one: one
    return dataclasses.replace(
        cluster,
        devices=tuple(
            recomputing(
                dataclasses.replace(
                    one,
                    points=uneven_curve(draw, one.points),
                    step_overhead_seconds=residuals(),
                    pass_overhead_seconds=tuple(draw.choice((0.0, 0.1, -0.1)) for _ in range(4)),
                )
            )
            for one in cluster.devices
        ),
        model=dataclasses.replace(cluster.model, linear_layers=layers),
        network=dataclasses.replace(
            cluster.network, synchronization_seconds=sent[0], step_seconds=sent[1]
        ),
        overlap=overlap,
    )


@pytest.mark.parametrize("seed", range(choose(quick=10, full=200)))
def test_the_bound_of_a_set_is_below_its_fastest_plan(seed):
    draw = random.Random(seed)
    cluster = draw.choice((random_flat_cluster, random_hosts))(draw)
    may_factor = draw.random() < 0.5
    cluster = hard_to_bound(draw, cluster)
    groups = [group.ranks for group in device_groups(cluster)]
    limits = {"global_batch": 12, "max_micro_batch": 12}
    sets = list(active_sets(cluster, groups, ALL_STAGES, **limits, may_factor=may_factor))
    for before, after in itertools.pairwise(sets):
        assert before.bound <= after.bound * (1.0 + 1e-9)
    for active in draw.sample(sets, min(len(sets), 2)):
        limited = {"global_batch": 12, "preference": 0.0, "leave_out": "never"}
        limited["factored"] = "auto" if may_factor else "never"
        left = without_ranks(cluster, active.left_out)
        plans: tuple[Plan, ...] = ()
        with contextlib.suppress(NoPlanFits):
            plans = alternatives(left, **limited, within=math.inf)
        for plan in plans:
            assert active.bounds[plan.stage] <= predicted_seconds(plan) * (1.0 + 1e-9)


@pytest.mark.parametrize("seed", range(choose(quick=5, full=100)))
def test_search_finds_the_first_of_the_alternatives(seed):
    draw = random.Random(seed)
    cluster = draw.choice((random_flat_cluster, random_hosts))(draw)
    cluster = hard_to_bound(draw, cluster)
    request = {"global_batch": 12, "preference": draw.choice((0.0, 0.02, 0.3))}
    assert search(cluster, **request) == alternatives(cluster, **request)[0]


def test_of_all_sets_only_the_plans_that_are_returned_are_described(monkeypatch):
    described = []

    def count(*arguments):
        described.append(describe(*arguments))
        return described[-1]

    monkeypatch.setattr("poplar.planner.search.describe", count)
    cluster = flat_cluster((4.0, 4.0, 2.0, 1.0), (0.01, 0.01, 30.0, 10.0))
    plans = alternatives(cluster, global_batch=12)
    assert sorted(described, key=id) == sorted(plans, key=id)


def test_of_many_equal_ranks_a_few_or_parts_are_left_out():
    cluster = flat_cluster((1.0,) * 100, (0.01,) * 100)
    limits = {"global_batch": 400, "max_micro_batch": 16, "may_factor": False}
    sets = active_sets(cluster, [range(100)], ALL_STAGES, **limits)
    numbers = sorted(len(active.left_out) for active in sets)
    assert numbers[:6] == [1, 2, 3, 4, 6, 12]
    assert len(numbers) == 19
    assert numbers[-1] == 94


def test_a_rank_behind_a_slow_link_is_left_out_and_the_explanation_says_why():
    cluster = flat_cluster((4.0, 4.0, 2.0), (0.01, 0.01, 30.0))
    plan = search(cluster, global_batch=12)
    assert plan.left_out == (2,)
    alone = search(without_ranks(cluster, (2,)), global_batch=12)
    assert plan.of_active_ranks() == alone
    assert plan.prediction["step_seconds"] == alone.prediction["step_seconds"]
    assert plan.prediction["devices"] == ["4", "4", "2"]
    assert "3 ranks, without rank 2" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    explanation = explain(cluster, plan)
    (reason,) = explanation.left_out
    assert reason.ranks == (2,)
    assert reason.with_them < -0.5
    link = next(change for change in reason.remedies if change.what == "link")
    factor = float(link.amount.split()[0])
    assert (
        search(
            flat_cluster((4.0, 4.0, 2.0), (0.01, 0.01, 30.0 / factor)),
            global_batch=12,
        ).left_out
        == ()
    )
    (sentence,) = [one for one in explanation.sentences() if "left out" in one]
    assert "rank 2's link is the slowest" in sentence
    assert f"worth it with links {factor:g} times as fast" in sentence


def test_the_numbers_of_ranks_after_a_left_out_one_stay():
    cluster = flat_cluster((2.0, 4.0, 1.0), (30.0, 0.01, 0.01))
    plan = search(cluster, global_batch=12)
    assert plan.left_out == (0,)
    prediction = predict(cluster, plan)
    assert prediction.memory_bytes[0] == 0 < min(prediction.memory_bytes[1:])
    assert prediction.bound.startswith("rank 1's compute")
    explanation = explain(cluster, plan)
    assert explanation.bound.rank == 1
    assert {one.ranks for one in explanation.contributions} == {(1,), (2,)}
    timeline = simulate(cluster, plan)
    assert timeline.busy_seconds[0] == 0.0 < timeline.busy_seconds[1]
    assert timeline.step_seconds == pytest.approx(prediction.step_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rank 2 .* needs at least"),
        ({"global_batch": 40, "micro_batches": ((), (4,), (36,))}, "rank 2 .*: a micro-batch of"),
        ({"units": (UnitPlan("block", recomputed_on=(2,)),)}, "rank 2 .* recomputes units"),
        ({"host_state": (0.0, 0.0, 0.5)}, "rank 2 .* keeps 50.0%"),
    ],
)
@pytest.mark.parametrize("function", [predict, simulate, explain])
def test_a_refused_plan_names_the_rank_as_the_plan_does(function, changes, message):
    model = dataclasses.replace(MODEL, unit_names=("root", "block", "c", "d"), resident_units=(0,))
    devices = (device(1.0), device(1.0), device(1.0, memory=10**7))
    cluster = flat_cluster((1.0,) * 3, (0.1,) * 3)
    cluster = dataclasses.replace(cluster, model=model, devices=devices)
    fields = {"stage": 1, "global_batch": 8, "micro_batches": ((), (4,), (4,)), "left_out": (0,)}
    with pytest.raises(ValueError, match=message):
        function(cluster, Plan(shares=(0.0, 0.5, 0.5), **{**fields, **changes}))


def test_a_rank_that_is_left_out_waits_for_the_whole_step():
    plan = Plan(stage=1, global_batch=8, micro_batches=((), (8,)), shares=(0.0, 1.0), left_out=(0,))
    timeline = simulate(flat_cluster((1.0, 1.0), (0.1, 0.1)), plan)
    assert timeline.waiting_seconds[0] == timeline.step_seconds
    assert timeline.communication_seconds[0] == 0.0


def test_ranks_of_one_host_communicate_as_measured_within_hosts():
    """The rates of all links are those of the slow one, because all ranks were measured at once."""
    cluster = flat_cluster((4.0,) * 4, (30.0,) * 4)
    network = dataclasses.replace(
        cluster.network,
        hosts=(0, 0, 0, 1),
        within_host_seconds=(0.2, 0.1),
        step_seconds=(-5.0,) * 4,
        collective_latency_seconds=(1.0, 1.0),
    )
    cluster = dataclasses.replace(cluster, network=network)
    host, pair, alone = (without_ranks(cluster, left).network for left in ((3,), (2, 3), (0, 1, 2)))
    assert (host.reduce_scatter_seconds, host.all_gather_seconds) == pytest.approx((0.2, 0.1))
    assert (pair.reduce_scatter_seconds, pair.all_gather_seconds) == pytest.approx((0.15, 0.075))
    assert (alone.reduce_scatter_seconds, alone.all_gather_seconds) == (0.0, 0.0)
    assert host.step_seconds == (0.0,) * 4
    assert not host.collective_latency_seconds
    assert search(cluster, global_batch=12).left_out == (3,)


@pytest.mark.parametrize("hosts", ["aab", "abb", "aabb", "aaabb"])
def test_ranks_left_out_in_turn_are_as_if_left_out_at_once(hosts):
    cluster = flat_cluster((4.0,) * len(hosts), (30.0,) * len(hosts))
    cluster = dataclasses.replace(
        cluster,
        devices=tuple(device(4.0, host=host) for host in hosts),
        network=dataclasses.replace(cluster.network, within_host_seconds=(0.2, 0.1)),
    )
    for order in itertools.permutations(range(len(hosts))):
        in_turn, left = cluster, list(range(len(hosts)))
        for rank in order[:-1]:
            in_turn = without_ranks(in_turn, (left.index(rank),))
            left.remove(rank)
            at_once = without_ranks(cluster, set(range(len(hosts))) - set(left)).network
            names = {hosts[rank] for rank in left}
            assert bool(at_once.within_host_seconds) == (1 < len(names) < len(left))
            for name in ("within_host_seconds", "reduce_scatter_seconds", "all_gather_seconds"):
                both = getattr(in_turn.network, name), getattr(at_once, name)
                assert both[0] == pytest.approx(both[1]), (name, left)


def test_a_plan_without_the_second_rank_of_a_host_is_explained():
    cluster = flat_cluster((4.0, 0.1, 4.0), (0.1,) * 3)
    cluster = dataclasses.replace(
        cluster,
        devices=(device(4.0, host="a"), device(0.1, host="a"), device(4.0, host="b")),
        network=dataclasses.replace(cluster.network, within_host_seconds=(0.02, 0.02)),
    )
    plan = search(cluster, global_batch=12)
    assert plan.left_out == (1,)
    assert {one.ranks for one in explain(cluster, plan).contributions} == {(2,)}


def test_a_rank_without_memory_for_the_state_is_left_out():
    cluster = flat_cluster((4.0, 4.0), (0.01, 0.01))
    small = dataclasses.replace(cluster.devices[1], memory_bytes=10**6)
    cluster = dataclasses.replace(cluster, devices=(cluster.devices[0], small))
    with pytest.raises(NoPlanFits, match="without rank 1 at stage 0"):
        search(cluster, global_batch=4, stages=(0,), leave_out="never")
    assert search(cluster, global_batch=4, stages=(0,)).left_out == (1,)


@pytest.mark.parametrize("policy", ["even", "paper"])
def test_only_the_exact_policy_leaves_ranks_out(policy):
    cluster = flat_cluster((4.0, 4.0, 2.0), (0.01, 0.01, 30.0))
    assert search(cluster, global_batch=12, policy=policy).left_out == ()


def test_the_plan_of_the_active_ranks_and_back():
    plan = Plan(
        stage=3,
        global_batch=5,
        micro_batches=((1, 1), (), (0, 3)),
        shares=(0.25, 0.0, 0.75),
        units=(UnitPlan("block", shares=(0.5, 0.0, 0.5), recomputed_on=(2,)),),
        host_state=(0.0, 0.0, 0.5),
        left_out=(1,),
    )
    own = plan.of_active_ranks()
    assert own.micro_batches == ((1, 1), (0, 3))
    assert own.shares == (0.25, 0.75)
    assert own.units == (UnitPlan("block", shares=(0.5, 0.5), recomputed_on=(1,)),)
    assert own.host_state == (0.0, 0.5)
    assert own.beside(plan.left_out) == plan
    smaller = plan.with_largest_batches({2: 1})
    assert smaller.micro_batches == ((1, 0, 0, 1), (), (0, 1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"left_out": (0, 1)}, "at least one is active"),
        ({"left_out": (2,)}, "the plan has ranks 0 to 1"),
        ({"left_out": (1,), "shares": (0.5, 0.5)}, "rank 1 is left out, but it has a share"),
        ({"left_out": (0,)}, r"rank 0 is left out, but it has a share of the plan, passes \(4,\)"),
    ],
)
def test_a_rank_that_is_left_out_has_nothing(changes, message):
    plan = {"stage": 1, "global_batch": 4, "micro_batches": ((4,), ()), "shares": (1.0, 0.0)}
    with pytest.raises(ValueError, match=message):
        Plan(**{**plan, **changes})
