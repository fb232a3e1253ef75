"""`explain` says what bounds a plan, what would help and who is worth it, as new searches do."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random

import planning_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import cluster_of, device, seconds_of

import poplar
from poplar.plan import Plan
from poplar.planner import what_if
from poplar.planner.collective_costs import CollectiveCosts
from poplar.planner.device_groups import MAX_GROUPS, device_groups, with_equal_devices
from poplar.planner.explain import NOISE, explain
from poplar.planner.explanation import NEEDED, NOT_WORTH_IT, WORTH_IT, Explanation
from poplar.planner.prediction import memory_needed, predict
from poplar.planner.search import NoPlanFits, search
from poplar.planner.suggested_changes import suggested_changes
from poplar.profile import ModelProfile

MB = 10**6


def explained(cluster, global_batch, **options) -> Explanation:
    """Of the plan that a search finds with the same options."""
    wanted = {name: value for name, value in options.items() if name != "error"}
    return explain(cluster, search(cluster, global_batch=global_batch, **wanted), **options)


def tight(**changes):
    """Fast ranks that hold few samples beside slow ones: every pass more is a meeting more."""
    fast = device(4.0, memory=60 * MB)
    return cluster_of(fast, device(1.0, memory=80 * MB), communication=0.03, **changes)


def change_of(explanation: Explanation, what: str, ranks=()):
    return next((c for c in explanation.changes if (c.what, c.ranks) == (what, ranks)), None)


def without(explanation: Explanation, *ranks: int):
    return next(c for c in explanation.contributions if c.ranks == ranks)


# What bounds it


def test_a_plan_without_communication_is_bound_by_a_ranks_compute():
    told = explained(cluster_of(device(), device(), communication=0.0), 32)
    assert told.bound.what == "compute"
    assert told.bound.rank in (0, 1)
    assert told.bound.sentence.startswith(f"rank {told.bound.rank}'s compute (100 % busy)")


def test_a_slow_network_bounds_and_its_slowest_link_is_named():
    cluster = cluster_of(device(), device(), device(), communication=2.0)
    told = explained(cluster, 32, stages=(1,))
    assert (told.bound.what, told.bound.rank) == ("network", None)
    rates = (1e-9, 3e-9, 1e-9)
    network = dataclasses.replace(
        cluster.network, send_seconds_per_byte=rates, receive_seconds_per_byte=rates
    )
    slow_link = dataclasses.replace(cluster, network=network)
    told = explain(slow_link, Plan.even(3, 33, 11, 1))
    assert (told.bound.what, told.bound.rank) == ("network", 1)
    assert "rank 1's link is the slowest" in told.bound.sentence


def test_memory_bounds_where_larger_passes_would_mean_fewer_meetings():
    cluster = cluster_of(device(4.0, memory=64 * MB), device(memory=64 * MB), communication=0.2)
    told = explained(cluster, 64, stages=(3,))
    assert told.bound.what == "memory"
    assert f"rank {told.bound.rank}'s memory: it holds no more than" in told.bound.sentence


# What would help


def test_changes_gain_what_a_search_on_the_changed_cluster_gains():
    cluster = tight()
    told = explained(cluster, 64)
    before = told.step_seconds

    def gain(changed):
        return before / seconds_of(search(changed, global_batch=64)) - 1

    network = what_if.with_faster_network(cluster, 2.0)
    assert change_of(told, "network").gain == pytest.approx(gain(network))
    faster = what_if.with_faster_devices(cluster, (0,), 1.25)
    assert change_of(told, "device", (0,)).gain == pytest.approx(gain(faster))
    roomier = what_if.with_memory(cluster, {0: 15 * MB})
    assert change_of(told, "memory", (0,)).gain >= gain(roomier) - 1e-3
    assert str(change_of(told, "memory", (0,))).startswith("rank 0's memory: +14.3 MiB gives +")


def test_more_overlap_gains_what_a_search_with_it_gains():
    """Units as large as a buffer: those of small models travel at once, and hide nowhere."""
    model = ModelProfile(unit_numels=(8 * 2**20,) * 4)
    cluster = cluster_of(device(memory=10**10), device(memory=10**10), model=model)
    told = explained(cluster, 32)
    hidden = search(dataclasses.replace(cluster, overlap=1.0), global_batch=32)
    gain = told.step_seconds / seconds_of(hidden) - 1
    assert change_of(told, "overlap").gain == pytest.approx(gain)
    assert gain > 0.0


def test_changes_are_told_by_gain_and_only_above_noise():
    told = explained(tight(), 64)
    gains = [change.gain for change in told.changes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > NOISE
    idle = device(0.02, optimizer_seconds=0.0)
    alone = explained(cluster_of(device(4.0), idle, communication=0.0), 16)
    assert change_of(alone, "network") is None
    assert change_of(alone, "device", (1,)) is None
    assert change_of(alone, "device", (0,)).gain == pytest.approx(0.25, abs=0.01)


def test_memory_helps_beyond_what_was_measured_only_where_it_binds():
    roomy = explained(cluster_of(device(largest=8), device(largest=8)), 64)
    assert not [change for change in roomy.changes if change.what == "memory"]
    larger = change_of(roomy, "batches")
    assert larger.gain > NOISE
    assert "larger max_batch" in str(larger)
    # Each holds its largest measured batch exactly: nothing is to be gained without more memory.
    full = device(memory=80 * MB, largest=8)
    full = dataclasses.replace(full, memory_bytes=predict_memory(full))
    told = explained(cluster_of(full), 64, stages=(0,))
    assert change_of(told, "batches") is None
    assert change_of(told, "memory", (0,)).gain > NOISE


def predict_memory(alone) -> int:
    roomy = dataclasses.replace(alone, memory_bytes=10**12)
    needed = predict(cluster_of(roomy), Plan.manual([8], stage=0)).memory_bytes[0]
    return int(needed / 0.95) + 1


def test_a_network_of_one_rank_is_no_change():
    told = explained(cluster_of(device()), 64)
    assert not [change for change in told.changes if change.what in ("network", "overlap")]
    assert told.contributions == ()


def test_overlap_that_is_complete_cannot_grow():
    assert change_of(explained(tight(overlap=1.0), 64), "overlap") is None


# Who is worth it


def test_a_rank_that_costs_more_than_it_brings_is_to_be_left_out():
    told = explained(cluster_of(device(4.0), device(0.2), communication=0.2), 64)
    useless = without(told, 1)
    assert useless.without > 1.0
    assert useless.verdict == NOT_WORTH_IT
    assert str(useless).startswith("without rank 1: +")
    assert str(useless).endswith(": leave it out")
    assert without(told, 0).verdict == WORTH_IT
    assert told.contributions[0] == useless, "what is worth least comes first"


def test_a_rank_within_the_error_is_not_worth_it():
    cluster = cluster_of(device(4.0), device(0.2), communication=0.0)
    little = without(explained(cluster, 64, error=0.2), 1)
    assert -0.1 < little.without < 0.0
    assert little.verdict == NOT_WORTH_IT
    assert str(little).endswith("not worth it, within the error")
    assert without(explained(cluster, 64, error=0.0), 1).verdict == WORTH_IT


def test_a_rank_without_which_nothing_fits_is_needed():
    told = explained(tight(), 64)
    needed = without(told, 1)
    assert needed.without is None
    assert needed.verdict == NEEDED
    assert str(needed) == "without rank 1: no plan fits"
    assert told.contributions[-1] == needed


def test_equal_devices_are_one_kind_and_go_together():
    told = explained(cluster_of(*[device(4.0)] * 2, *[device(1.0)] * 3), 64)
    assert {c.ranks for c in told.contributions} == {(0, 1), (2, 3, 4)}
    of_devices = {change.ranks for change in told.changes if change.what == "device"}
    assert of_devices <= {(0, 1), (2, 3, 4)}
    assert "device of ranks 0-1: 25 % faster" in str(told)
    alike = explained(cluster_of(*[device()] * 4, communication=0.0), 64)
    assert [c.ranks for c in alike.contributions] == [(3,)], "of equal ranks, what one of them adds"
    assert alike.contributions[0].without == pytest.approx(-0.28, abs=0.05)


def test_planning_is_worth_what_it_gains_over_even():
    cluster = cluster_of(device(4.0), device(1.0))
    plan = search(cluster, global_batch=32)
    even = search(cluster, global_batch=32, policy="even")
    told = explain(cluster, plan)
    assert told.over_even == pytest.approx(seconds_of(even) / seconds_of(plan) - 1)
    assert told.verdict == WORTH_IT
    equal = explained(cluster_of(device(), device()), 32)
    assert equal.over_even == pytest.approx(0.0)
    assert equal.verdict == NOT_WORTH_IT
    assert "over an even plan: +0.0 %, error ±4 %: not worth it" in str(equal)
    small = device(memory=58 * MB, sample_bytes=1000 * MB)
    uneven_only = explained(cluster_of(device(), small), 8)
    assert uneven_only.over_even is None
    assert uneven_only.verdict == NEEDED


def test_a_plan_by_hand_is_told_that_there_is_a_faster_one():
    cluster = cluster_of(device(4.0), device(1.0))
    told = explain(cluster, Plan.even(2, 32, 16, 0))
    best = search(cluster, global_batch=32)
    assert told.faster_plan == pytest.approx(told.step_seconds / seconds_of(best) - 1)
    assert explain(cluster, best).faster_plan == 0.0
    # Gains are over the best plan: none of them is what planning alone would gain.
    assert told.changes == explain(cluster, best).changes


def test_stages_and_the_largest_pass_are_kept():
    told = explained(tight(), 64, stages=(3,), max_micro_batch=2)
    assert {change.stage for change in told.changes} == {3}
    assert change_of(told, "batches") is None


# Doubts and mistakes


def test_a_batch_in_a_hole_of_the_profile_is_a_doubt():
    sparse = device(largest=64)
    sparse = dataclasses.replace(sparse, points=(sparse.points[0], sparse.points[-1]))
    told = explain(cluster_of(sparse), Plan.manual([20], stage=0))
    assert told.doubts == (
        "rank 0 (device of speed 1.0) runs 20 samples, but nothing was measured between 1 and 64",
    )
    assert "uncertain: rank 0" in str(told)
    assert explain(cluster_of(sparse), Plan.manual([64], stage=0)).doubts == ()
    assert explain(cluster_of(device(largest=64)), Plan.manual([20], stage=0)).doubts == ()


@pytest.mark.parametrize("error", [-0.1, 1.0, float("nan")])
def test_an_error_that_is_none_is_refused(error):
    cluster = cluster_of(device())
    with pytest.raises(ValueError, match="error must be a fraction of a step"):
        explain(cluster, search(cluster, global_batch=8), error=error)


def test_what_no_plan_has_is_refused():
    cluster = cluster_of(device())
    plan = search(cluster, global_batch=8)
    with pytest.raises(ValueError, match="stages must be some of"):
        explain(cluster, plan, stages=())
    with pytest.raises(ValueError, match="the plan is for 1 ranks, but the profile has 2"):
        explain(cluster_of(device(), device()), plan)


# As values


def test_an_explanation_is_the_same_after_json(tmp_path):
    told = explained(tight(), 64)
    assert Explanation.from_dict(json.loads(json.dumps(told.to_dict()))) == told
    told.to_json(tmp_path / "told.json")
    again = Explanation.from_json(tmp_path / "told.json")
    assert again == told
    assert hash(again) == hash(told)
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.error = 0.5


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[]", r"told\.json: not an explanation of format 1"),
        ('{"version": 2}', "not an explanation of format 1"),
        ('{"version": 1}', "not an explanation of format 1: 'bound'"),
        ("{", r"told\.json: "),
    ],
)
def test_what_is_no_explanation_is_refused(tmp_path, content, complaint):
    (tmp_path / "told.json").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        Explanation.from_json(tmp_path / "told.json")


def test_it_is_a_public_name():
    assert poplar.explain is explain
    assert poplar.Explanation is Explanation


# Many ranks


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


def test_noise_makes_no_kinds_but_speed_memory_and_names_do():
    same = noisy([device(name="A")] * 4)
    others = [device(1.2, name="A"), device(memory=2 * 10**9, name="A"), device(name="B")]
    kinds = device_groups(cluster_of(*same, *others))
    assert [kind.ranks for kind in kinds] == [(0, 1, 2, 3), (4,), (5,), (6,)]
    assert kinds[-1].device == "B"


def test_there_are_no_more_kinds_than_a_person_reads():
    many = cluster_of(*(device(1.0 + 0.1 * number, name="A") for number in range(60)))
    assert len(device_groups(many)) <= MAX_GROUPS


def test_a_search_for_each_kind_not_for_each_rank(monkeypatch):
    cluster = cluster_of(*noisy([device(4.0, name="A"), device(1.0, name="B")] * 40))
    plan = Plan.even(80, 640, 8, 1)
    seen = []

    def counted(cluster, **request):
        seen.append(cluster.world_size)
        return search(cluster, **request)

    monkeypatch.setitem(explain.__globals__, "search", counted)
    told = explain(cluster, plan, stages=(1,))
    assert {c.ranks for c in told.contributions} == {tuple(range(0, 80, 2)), tuple(range(1, 80, 2))}
    assert len(seen) < 12
    assert told.step_seconds == predict(cluster, plan).step_seconds


def test_with_equal_devices_devices_of_a_kind_are_equal():
    devices = noisy([device(4.0, name="A"), device(1.0, name="B")] * 5)
    devices[2] = dataclasses.replace(devices[2], memory_bytes=10**9 - 1)
    cluster = cluster_of(*devices)
    smooth = with_equal_devices(cluster, device_groups(cluster))
    assert len(set(smooth.devices)) == 2
    assert smooth.devices[0].memory_bytes == 10**9 - 1
    middle = sorted(one.seconds(16) for one in devices[::2])[2]
    assert smooth.devices[0].seconds(16) == middle


# Clusters that differ in one thing


@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_collectives_without_a_rank_follow_from_the_links(seed, ranks):
    cluster = planning_oracle.random_cluster(random.Random(seed), ranks, 2)
    left = what_if.without(cluster, (0,))
    assert left.devices == cluster.devices[1:]
    if ranks == 2:
        assert left.network.reduce_scatter_seconds == left.network.all_gather_seconds == 0.0
        return
    before = CollectiveCosts.of(cluster.network).reduce_scatter.seconds((1 / ranks,) * ranks)
    fewer = (1 / (ranks - 1),) * (ranks - 1)
    after = CollectiveCosts.of(left.network).reduce_scatter.seconds(fewer)
    assert after <= before * (1 + 1e-9), "fewer ranks move less, and no link became slower"
    rates = [max(pair) for pair in zip(*rates_of(cluster), strict=True)]
    if rates[0] < max(rates):
        part = (ranks - 2) / (ranks - 1) / ((ranks - 1) / ranks)
        assert after == pytest.approx(part * before)


def rates_of(cluster):
    return cluster.network.send_seconds_per_byte, cluster.network.receive_seconds_per_byte


def test_larger_batches_go_on_in_a_line():
    larger = what_if.with_larger_batches(cluster_of(device(largest=8)), 2).devices[0]
    assert larger.max_batch == 16
    assert larger.seconds(16) == pytest.approx(device().seconds(16))
    assert larger.activation_bytes(16) == device().activation_bytes(16)
    single = dataclasses.replace(device(), points=device().points[:1])
    assert what_if.with_larger_batches(cluster_of(single), 2).devices[0] == single


# What is missing where nothing fits


def room_for(ranks, *, stage):
    """Bytes of each of so many equal ranks with a sample, less than which they do not fit."""
    cluster = cluster_of(*[device(memory=10**12)] * ranks)
    needed = max(memory_needed(cluster, Plan.manual([1] * ranks, stage=stage)))
    return math.ceil(needed / (1.0 - cluster.memory_reserve)) + 1


def suggestions(cluster, **wanted):
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, **wanted)
    assert str(caught.value).endswith(", or ".join(caught.value.suggestions))
    return caught.value.suggestions


def test_a_higher_stage_that_fits_is_said():
    small = device(memory=room_for(2, stage=3))
    cluster = cluster_of(small, small)
    said = suggestions(cluster, stages=(0,))[0]
    assert search(cluster, global_batch=4, stages=(int(said.removeprefix("stage ")),))


def test_a_lower_stage_is_said_where_no_higher_one_fits():
    cluster = cluster_of(device(memory=10 * MB))
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, stages=(3,))
    (missing,) = caught.value.shortfalls
    suggestions = suggested_changes(
        cluster, [missing], lambda costs: None if costs.stage == 1 else missing
    )
    assert suggestions[0] == "stage 1"


def test_that_uneven_shares_fit_is_said_of_policies_that_know_even_ones_only():
    cluster = cluster_of(device(memory=200 * MB), device(memory=50 * MB))
    said = suggestions(cluster, stages=(2,), policy="even")
    assert said[0].startswith("policy 'exact'")
    assert search(cluster, global_batch=4, stages=(2,)).shares[0] > 0.5


def test_the_least_memory_that_fits_is_said_and_is_the_least():
    small = device(memory=room_for(4, stage=2))
    cluster = cluster_of(small, small)
    (added,) = [added_by(one) for one in suggestions(cluster, stages=(2,)) if " more on " in one]
    ((rank, size),) = added.items()
    enough = what_if.with_memory(cluster, added)
    assert search(enough, global_batch=4, stages=(2,)).stage == 2
    too_little = what_if.with_memory(cluster, {rank: size - (1 << 20)})
    with pytest.raises(NoPlanFits):
        search(too_little, global_batch=4, stages=(2,))


@pytest.mark.parametrize(("policy", "stage"), [("exact", 0), ("even", 1)])
def test_memory_that_several_ranks_lack_is_said_of_each(policy, stage):
    cluster = cluster_of(device(memory=10 * MB), device(memory=20 * MB))
    wanted = {"stages": (stage,), "policy": policy}
    (added,) = [added_by(one) for one in suggestions(cluster, **wanted) if " more on " in one]
    assert set(added) == {0, 1}
    assert added[0] > added[1] > 0
    assert search(what_if.with_memory(cluster, added), global_batch=4, **wanted).stage == stage
    for rank, size in added.items():
        too_little = what_if.with_memory(cluster, {**added, rank: size - (2 << 20)})
        with pytest.raises(NoPlanFits):
            search(too_little, global_batch=4, **wanted)


def test_many_ranks_are_given_alike():
    many = suggestions(cluster_of(*[device(memory=10 * MB)] * 40), stages=(0,))
    assert many[0].endswith("MiB more on each of all 40 ranks at stage 0")


def test_ranks_that_are_too_small_for_the_others_are_said():
    cluster = cluster_of(device(), device(memory=10 * MB), device(), device(memory=10 * MB))
    assert suggestions(cluster, stages=(0, 1))[0] == "the others without ranks 1, 3 at stage 0"
    assert search(what_if.without(cluster, (1, 3)), global_batch=4, stages=(0,)).stage == 0


def test_how_many_more_devices_is_said():
    small = device(memory=room_for(4, stage=3), name="A")
    cluster = cluster_of(small, small)
    said = next(one for one in suggestions(cluster, stages=(3,)) if " more A " in one)
    count, _, _ = said.partition(" more A at stage 3")
    assert search(what_if.with_copies(cluster, 0, int(count)), global_batch=4, stages=(3,))
    with pytest.raises(NoPlanFits):
        search(what_if.with_copies(cluster, 0, int(count) - 1), global_batch=4, stages=(3,))


def test_checkpointing_is_said_only_where_activations_are_too_much():
    full = device(memory=100 * MB, sample_bytes=1000 * MB)
    said = suggestions(cluster_of(full, full))
    assert said[-1].startswith("activation checkpointing or shorter sequences that leave at most 7")
    assert not any(
        "checkpointing" in one for one in suggestions(cluster_of(device(memory=10 * MB)))
    )


@given(seed=st.integers(0, 2**32), stage=st.sampled_from(planning_oracle.STAGES))
@settings(max_examples=40, deadline=None)
def test_more_memory_as_it_is_said_does_fit(seed, stage):
    """The sentence is checked on random clusters by reading it back."""
    draw = random.Random(seed)
    cluster = planning_oracle.random_cluster(draw, draw.choice((1, 2, 3)), stage)
    starved = dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(one, name="device", memory_bytes=one.memory_bytes // 9)
            for one in cluster.devices
        ),
    )
    try:
        search(starved, global_batch=4, stages=(stage,))
    except NoPlanFits as error:
        said = next(one for one in error.suggestions if " more on " in one)
    else:
        return
    assert search(what_if.with_memory(starved, added_by(said)), global_batch=4, stages=(stage,))


def added_by(said: str) -> dict[int, int]:
    added = {}
    for part in said.rpartition(" at stage")[0].split(" and "):
        said, _, ranks = part.partition(" more on ")
        size, unit = said.split()
        if "all" in ranks:
            named = range(int(ranks.split()[3]))
        else:
            named = []
            for run in ranks.replace("each of ", "").split(" ", 1)[1].split(", "):
                first, _, last = run.partition("-")
                named += range(int(first), int(last or first) + 1)
        bytes_each = round(float(size) * {"MiB": 2**20, "GiB": 2**30}[unit])
        added |= dict.fromkeys(named, bytes_each)
    return added


def test_a_small_memory_limit_is_written_in_kib():
    with pytest.raises(NoPlanFits, match=r"may use 18\.6 KiB"):
        search(cluster_of(device(memory=20_000)), global_batch=4)


def test_suggestions_are_computed_when_they_are_read(monkeypatch):
    computed = []
    monkeypatch.setattr(
        "poplar.planner.suggested_changes.suggested_changes",
        lambda *arguments: computed.append(arguments) or ("a larger machine",),
    )
    with pytest.raises(NoPlanFits) as caught:
        search(cluster_of(device(memory=10 * MB)), global_batch=4)
    assert not computed
    assert str(caught.value).endswith("what would fit: a larger machine")
    assert str(caught.value)
    assert len(computed) == 1


def test_the_error_survives_pickling():
    with pytest.raises(NoPlanFits) as caught:
        search(cluster_of(device(memory=10 * MB)), global_batch=4, policy="even")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.suggestions == caught.value.suggestions
    assert again.shortfalls == caught.value.shortfalls


def test_one_rank_that_is_slow_in_the_engine_alone_is_of_another_kind():
    """Its plain passes are as fast as everybody's; among many ranks that must not get lost."""
    slow = dataclasses.replace(device(), pass_overhead_seconds=(0.5,) * 4)
    cluster = cluster_of(*[device()] * 39, slow)
    assert [len(kind.ranks) for kind in device_groups(cluster)] == [39, 1]
    plan = search(cluster, global_batch=320, stages=(0,))
    even = search(cluster, global_batch=320, stages=(0,), policy="even")
    told = explain(cluster, plan, stages=(0,)).over_even
    assert told == pytest.approx(seconds_of(even) / seconds_of(plan) - 1)
    assert told > 0.1
