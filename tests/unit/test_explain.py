"""`explain`: the bottleneck of a plan, gains of changes, and what each device adds."""

from __future__ import annotations

import dataclasses
import json
import random

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from hypothesis import given
from hypothesis import strategies as st
from test_search import seconds_of

from poplar.planner import what_if
from poplar.planner.collective_costs import CollectiveCosts
from poplar.planner.explain import NEEDED, NOISE, NOT_WORTH_IT, WORTH_IT, Explanation, explain
from poplar.planner.prediction import predict
from poplar.planner.what_if import MAX_GROUPS, device_groups, with_equal_devices
from poplar.values.plan import Plan

MB = 10**6


def explained(cluster, global_batch, **options) -> Explanation:
    """The explanation of the plan that a search with the same options finds."""
    wanted = {name: value for name, value in options.items() if name != "error"}
    return explain(cluster, search(cluster, global_batch=global_batch, **wanted), **options)


def tight(**changes):
    """Fast ranks that hold few samples and slow ones: every further pass is a synchronization."""
    fast = device(4.0, memory=60 * MB)
    return cluster_of(fast, device(1.0, memory=80 * MB), communication=0.03, **changes)


def change_of(explanation: Explanation, what: str, ranks=()):
    return next((c for c in explanation.changes if (c.what, c.ranks) == (what, ranks)), None)


def without(explanation: Explanation, *ranks: int):
    return next(c for c in explanation.contributions if c.ranks == ranks)


def test_stages_without_a_profiled_step_are_named():
    observed = dataclasses.replace(tight(), observed_stages=(2, 3))
    (sentence,) = explained(observed, 16).uncertainties
    assert sentence.startswith("no plan of stage 0 or 1 was compared")
    assert explained(observed, 16, stages=(1, 3)).uncertainties == ()
    assert explained(tight(), 16).uncertainties == ()


# The bottleneck


def test_a_plan_without_communication_is_bound_by_a_ranks_compute():
    explanation = explained(cluster_of(device(), device(), communication=0.0), 32)
    assert explanation.bound.what == "compute"
    assert explanation.bound.rank in (0, 1)
    assert explanation.bound.sentence.startswith(
        f"rank {explanation.bound.rank}'s compute (100 % busy)"
    )


def test_a_slow_network_is_the_bottleneck_and_the_slowest_link_is_named():
    cluster = cluster_of(device(), device(), device(), communication=2.0)
    explanation = explained(cluster, 32, stages=(1,))
    assert (explanation.bound.what, explanation.bound.rank) == ("network", None)
    rates = (1e-9, 3e-9, 1e-9)
    network = dataclasses.replace(
        cluster.network, send_seconds_per_byte=rates, receive_seconds_per_byte=rates
    )
    slow_link = dataclasses.replace(cluster, network=network)
    explanation = explain(slow_link, Plan.even(3, 33, 11, 1))
    assert (explanation.bound.what, explanation.bound.rank) == ("network", 1)
    assert "rank 1's link is the slowest" in explanation.bound.sentence


def test_memory_is_the_bottleneck_if_larger_passes_would_save_synchronizations():
    cluster = cluster_of(device(4.0, memory=64 * MB), device(memory=64 * MB), communication=0.2)
    explanation = explained(cluster, 64, stages=(3,))
    assert explanation.bound.what == "memory"
    assert (
        f"rank {explanation.bound.rank}'s memory: it holds no more than"
        in explanation.bound.sentence
    )


# Changes


def test_changes_gain_what_a_search_on_the_changed_cluster_gains():
    cluster = tight()
    explanation = explained(cluster, 64)
    before = explanation.step_seconds

    def gain(changed):
        return before / seconds_of(search(changed.cluster, global_batch=64)) - 1

    network = what_if.faster_network(cluster)
    assert change_of(explanation, "network").gain == pytest.approx(gain(network))
    fast = device_groups(cluster)[0]
    faster = what_if.faster_devices(cluster, fast, 1.25)
    assert change_of(explanation, "device", (0,)).gain == pytest.approx(gain(faster))
    more_memory = what_if.more_memory(cluster, fast, 14)
    assert change_of(explanation, "memory", (0,)).gain >= gain(more_memory) * 0.98
    assert str(change_of(explanation, "memory", (0,))).startswith(
        "rank 0's memory: +14.0 MiB gives +"
    )


def test_changes_are_sorted_by_gain_and_above_the_noise():
    explanation = explained(tight(), 64)
    gains = [change.gain for change in explanation.changes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > NOISE
    idle = device(0.02, optimizer_seconds=0.0)
    alone = explained(cluster_of(device(4.0), idle, communication=0.0), 16)
    assert change_of(alone, "network") is None
    assert change_of(alone, "device", (1,)) is None
    assert change_of(alone, "device", (0,)).gain == pytest.approx(0.25, abs=0.01)


def test_more_memory_is_a_change_only_where_memory_binds():
    roomy = explained(cluster_of(device(largest=8), device(largest=8)), 64)
    assert not [change for change in roomy.changes if change.what == "memory"]
    larger = change_of(roomy, "batches")
    assert larger.gain > NOISE
    assert "larger max_batch" in str(larger)
    # Memory for exactly the largest measured batch: nothing can be gained without more memory.
    full = device(memory=80 * MB, largest=8)
    full = dataclasses.replace(full, memory_bytes=predict_memory(full))
    explanation = explained(cluster_of(full), 64, stages=(0,))
    assert change_of(explanation, "batches") is None
    assert change_of(explanation, "memory", (0,)).gain > NOISE


def predict_memory(alone) -> int:
    roomy = dataclasses.replace(alone, memory_bytes=10**12)
    needed = predict(cluster_of(roomy), Plan.manual([8], stage=0)).memory_bytes[0]
    return int(needed / 0.95) + 1


def test_one_rank_has_no_network_changes():
    explanation = explained(cluster_of(device()), 64)
    assert not [change for change in explanation.changes if change.what in ("network", "overlap")]
    assert explanation.contributions == ()


def test_full_overlap_is_not_a_change():
    assert change_of(explained(tight(overlap=1.0), 64), "overlap") is None


# Contributions


def test_a_rank_that_slows_the_others_should_be_left_out():
    explanation = explained(cluster_of(device(4.0), device(0.2), communication=0.2), 64)
    useless = without(explanation, 1)
    assert useless.without > 1.0
    assert useless.verdict == NOT_WORTH_IT
    assert str(useless).startswith("without rank 1: +")
    assert str(useless).endswith(': leave it out with leave_out="auto"')
    assert without(explanation, 0).verdict == WORTH_IT
    assert explanation.contributions[0] == useless, "the least valuable comes first"


def test_a_rank_within_the_error_is_not_worth_it():
    cluster = cluster_of(device(4.0), device(0.2), communication=0.0)
    little = without(explained(cluster, 64, error=0.2), 1)
    assert -0.1 < little.without < 0.0
    assert little.verdict == NOT_WORTH_IT
    assert str(little).endswith("not worth it, within the error")
    assert without(explained(cluster, 64, error=0.0), 1).verdict == WORTH_IT


def test_a_rank_without_which_no_plan_fits_is_needed():
    explanation = explained(tight(), 64)
    needed = without(explanation, 1)
    assert needed.without is None
    assert needed.verdict == NEEDED
    assert str(needed) == "without rank 1: no plan fits"
    assert explanation.contributions[-1] == needed


def test_equal_devices_form_a_group_that_changes_together():
    explanation = explained(cluster_of(*[device(4.0)] * 2, *[device(1.0)] * 3), 64)
    assert {c.ranks for c in explanation.contributions} == {(0, 1), (2, 3, 4)}
    of_devices = {change.ranks for change in explanation.changes if change.what == "device"}
    assert of_devices <= {(0, 1), (2, 3, 4)}
    assert "device of ranks 0-1: 25 % faster" in str(explanation)
    equal = explained(cluster_of(*[device()] * 4, communication=0.0), 64)
    assert [c.ranks for c in equal.contributions] == [(3,)], "of equal ranks, one represents all"
    assert equal.contributions[0].without == pytest.approx(-0.28, abs=0.05)


def test_the_verdict_compares_with_the_even_plan():
    cluster = cluster_of(device(4.0), device(1.0))
    plan = search(cluster, global_batch=32)
    even = search(cluster, global_batch=32, policy="even")
    explanation = explain(cluster, plan)
    assert explanation.over_even == pytest.approx(seconds_of(even) / seconds_of(plan) - 1)
    assert explanation.verdict == WORTH_IT
    equal = explained(cluster_of(device(), device()), 32)
    assert equal.over_even == pytest.approx(0.0)
    assert equal.verdict == NOT_WORTH_IT
    assert "over an even plan: +0.0 %, error ±5 %: not worth it" in str(equal)
    small = device(memory=58 * MB, sample_bytes=1000 * MB)
    uneven_only = explained(cluster_of(device(), small), 8)
    assert uneven_only.over_even is None
    assert uneven_only.verdict == NEEDED


def test_a_faster_plan_is_reported_for_a_manual_plan():
    cluster = cluster_of(device(4.0), device(1.0))
    explanation = explain(cluster, Plan.even(2, 32, 16, 0))
    best = search(cluster, global_batch=32)
    assert explanation.faster_plan == pytest.approx(explanation.step_seconds / seconds_of(best) - 1)
    assert explain(cluster, best).faster_plan == 0.0
    # Gains are relative to the best plan, so they do not include what planning alone gains.
    assert explanation.changes == explain(cluster, best).changes


# Uncertainty and invalid arguments


def test_a_search_that_ended_early_says_which_memory_made_it_hard():
    cluster = tight()
    plan = search(cluster, global_batch=48)
    hard = {**plan.prediction, "optimality_gap": 0.07}
    (sentence,) = explain(cluster, dataclasses.replace(plan, prediction=hard)).uncertainties
    assert f"a plan of stage {plan.stage} that is up to 7 % faster" in sentence
    full = max(range(2), key=lambda rank: plan.prediction["memory_bytes"][rank] / (60, 80)[rank])
    assert f"most of all on rank {full} ({cluster.devices[full].name}), which needs" in sentence
    assert explain(cluster, plan).uncertainties == ()


def test_a_batch_in_a_gap_of_the_profile_is_uncertain():
    sparse = device(largest=64)
    sparse = dataclasses.replace(sparse, points=(sparse.points[0], sparse.points[-1]))
    explanation = explain(cluster_of(sparse), Plan.manual([20], stage=0))
    assert explanation.uncertainties == (
        "rank 0 (device of speed 1.0) runs 20 samples, but nothing was measured between 1 and 64",
    )
    assert "uncertain: rank 0" in str(explanation)
    assert explain(cluster_of(sparse), Plan.manual([64], stage=0)).uncertainties == ()
    assert explain(cluster_of(device(largest=64)), Plan.manual([20], stage=0)).uncertainties == ()


@pytest.mark.parametrize("error", [-0.1, float("inf"), float("nan")])
def test_an_invalid_error_is_refused(error):
    cluster = cluster_of(device())
    with pytest.raises(ValueError, match="error must be a fraction of a step"):
        explain(cluster, search(cluster, global_batch=8), error=error)


# Values


def test_an_explanation_is_written_as_json():
    explanation = explained(tight(), 64)
    content = json.loads(json.dumps(explanation.to_dict()))
    fields = {field.name for field in dataclasses.fields(Explanation)}
    assert set(content) == {"version", *fields}
    assert set(content["bound"]) == {"what", "rank", "sentence"}
    of_change = {"what", "ranks", "device", "amount", "gain", "stage"}
    assert {frozenset(one) for one in content["changes"]} == {frozenset(of_change)}
    of_contribution = {"ranks", "device", "without", "verdict"}
    assert {frozenset(one) for one in content["contributions"]} == {frozenset(of_contribution)}
    assert content["changes"][0]["gain"] == explanation.changes[0].gain


# Device groups


def noisy(devices, seed=1):
    draw = random.Random(seed)
    return [
        dataclasses.replace(
            one,
            points=tuple(
                dataclasses.replace(p, seconds=p.seconds * draw.uniform(1.0, 1.02))
                for p in one.points
            ),
        )
        for one in devices
    ]


def test_groups_differ_by_speed_memory_or_name_but_not_by_noise():
    same = noisy([device(name="A")] * 4)
    others = [device(1.2, name="A"), device(memory=2 * 10**9, name="A"), device(name="B")]
    groups = device_groups(cluster_of(*same, *others))
    assert [group.ranks for group in groups] == [(0, 1, 2, 3), (4,), (5,), (6,)]
    assert groups[-1].device == "B"


def test_the_number_of_groups_is_limited():
    many = cluster_of(*(device(1.0 + 0.1 * number, name="A") for number in range(60)))
    assert len(device_groups(many)) <= MAX_GROUPS


def test_there_is_one_search_per_group_not_per_rank(monkeypatch):
    cluster = cluster_of(*noisy([device(4.0, name="A"), device(1.0, name="B")] * 40))
    plan = Plan.even(80, 640, 8, 1)
    seen = []

    def counted(cluster, **request):
        seen.append(cluster.world_size)
        return search(cluster, **request)

    monkeypatch.setattr("poplar.planner.explain.search", counted)
    explanation = explain(cluster, plan, stages=(1,))
    assert {c.ranks for c in explanation.contributions} == {
        tuple(range(0, 80, 2)),
        tuple(range(1, 80, 2)),
    }
    assert len(seen) < 12
    assert explanation.step_seconds == predict(cluster, plan).step_seconds


def test_devices_of_a_group_are_made_equal():
    devices = noisy([device(4.0, name="A"), device(1.0, name="B")] * 17)
    devices[2] = dataclasses.replace(devices[2], memory_bytes=10**9 - 1)
    cluster = cluster_of(*devices)
    smooth = with_equal_devices(cluster, device_groups(cluster))
    assert len(set(smooth.devices)) == 2
    assert smooth.devices[0].memory_bytes == 10**9 - 1
    middle = sorted(one.seconds(16) for one in devices[::2])[8]
    assert smooth.devices[0].seconds(16) == middle


def test_devices_of_a_group_stay_on_their_hosts():
    """What the collectives of some ranks take depends on their hosts."""
    kinds = {"a": 4.0, "b": 4.0, "c": 1.0, "d": 1.0}
    devices = [device(speed, host=host) for host, speed in kinds.items() for _ in range(9)]
    cluster = cluster_of(*devices)
    assert with_equal_devices(cluster, device_groups(cluster)) == cluster


def test_a_rank_with_large_pass_overhead_is_in_another_group():
    """Its plain passes are as fast as those of the other 39 ranks."""
    slow = dataclasses.replace(device(), pass_overhead_seconds=(0.5,) * 4)
    cluster = cluster_of(*[device()] * 39, slow)
    assert [len(group.ranks) for group in device_groups(cluster)] == [39, 1]
    plan = search(cluster, global_batch=320, stages=(0,))
    even = search(cluster, global_batch=320, stages=(0,), policy="even")
    over_even = explain(cluster, plan, stages=(0,)).over_even
    assert over_even == pytest.approx(seconds_of(even) / seconds_of(plan) - 1)
    assert over_even > 0.1


# Clusters that differ in one respect


def extended(one):
    """The device with a curve up to twice the largest measured batch."""
    return what_if.larger_batches(cluster_of(one)).cluster.devices[0]


@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
def test_collectives_without_a_rank_follow_from_the_links(seed, ranks):
    cluster = planning_oracle.random_cluster(random.Random(seed), ranks, 2)
    left = what_if.without(cluster, (0,)).cluster
    assert left.devices == cluster.devices[1:]
    if ranks == 2:
        assert left.network.reduce_scatter_seconds == left.network.all_gather_seconds == 0.0
        return
    before = CollectiveCosts.of(cluster.network).reduce_scatter.seconds((1 / ranks,) * ranks)
    fewer = (1 / (ranks - 1),) * (ranks - 1)
    after = CollectiveCosts.of(left.network).reduce_scatter.seconds(fewer)
    assert after <= before * (1 + 1e-9), "fewer ranks communicate less, and no link is slower"
    rates = [max(pair) for pair in zip(*rates_of(cluster), strict=True)]
    if rates[0] < max(rates):
        part = (ranks - 2) / (ranks - 1) / ((ranks - 1) / ranks)
        assert after == pytest.approx(part * before)


def rates_of(cluster):
    return cluster.network.send_seconds_per_byte, cluster.network.receive_seconds_per_byte


def test_larger_batches_are_extrapolated_linearly():
    larger = extended(device(largest=8))
    assert larger.max_batch == 16
    assert larger.seconds(16) == pytest.approx(device().seconds(16))
    assert larger.activation_bytes(16) == device().activation_bytes(16)
    single = dataclasses.replace(device(), points=device().points[:1])
    assert extended(single) == single
