"""Where no plan fits: the missing memory, and the smallest changes with which a plan fits."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random

import planning_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import cluster_of, device

from poplar.plan import Plan
from poplar.planner import what_if
from poplar.planner.prediction import memory_needed
from poplar.planner.search import NoPlanFits, search
from poplar.planner.suggested_changes import suggested_changes

MB = 10**6


def room_for(ranks, *, stage):
    """The least memory with which a sample fits on each of this many equal ranks."""
    cluster = cluster_of(*[device(memory=10**12)] * ranks)
    needed = max(memory_needed(cluster, Plan.manual([1] * ranks, stage=stage)))
    return math.ceil(needed / (1.0 - cluster.memory_reserve)) + 1


def suggestions(cluster, **wanted):
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, **wanted)
    assert str(caught.value).endswith(", or ".join(caught.value.suggestions))
    return caught.value.suggestions


def test_a_higher_stage_that_fits_is_suggested():
    small = device(memory=room_for(2, stage=3))
    cluster = cluster_of(small, small)
    suggestion = suggestions(cluster, stages=(0,))[0]
    assert search(cluster, global_batch=4, stages=(int(suggestion.removeprefix("stage ")),))


def test_a_lower_stage_is_suggested_if_no_higher_one_fits():
    cluster = cluster_of(device(memory=10 * MB))
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, stages=(3,))
    (missing,) = caught.value.shortfalls
    found = suggested_changes(
        cluster, [missing], lambda costs: None if costs.stage == 1 else missing
    )
    assert found[0] == "stage 1"


def test_policy_exact_is_suggested_if_only_uneven_shares_fit():
    cluster = cluster_of(device(memory=200 * MB), device(memory=50 * MB))
    found = suggestions(cluster, stages=(2,), policy="even")
    assert found[0].startswith("policy 'exact'")
    assert search(cluster, global_batch=4, stages=(2,)).shares[0] > 0.5


def test_the_suggested_memory_is_the_least_that_fits():
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
def test_memory_is_suggested_for_each_rank_that_lacks_it(policy, stage):
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


def test_many_ranks_get_the_same_suggested_memory():
    many = suggestions(cluster_of(*[device(memory=10 * MB)] * 40), stages=(0,))
    assert many[0].endswith("MiB more on each of all 40 ranks at stage 0")


def test_leaving_out_ranks_that_are_too_small_is_suggested():
    cluster = cluster_of(device(), device(memory=10 * MB), device(), device(memory=10 * MB))
    assert suggestions(cluster, stages=(0, 1))[0] == "the others without ranks 1, 3 at stage 0"
    assert search(what_if.without(cluster, (1, 3)), global_batch=4, stages=(0,)).stage == 0


def test_the_suggested_number_of_devices_is_the_least_that_fits():
    small = device(memory=room_for(4, stage=3), name="A")
    cluster = cluster_of(small, small)
    suggestion = next(one for one in suggestions(cluster, stages=(3,)) if " more A " in one)
    count, _, _ = suggestion.partition(" more A at stage 3")
    assert search(what_if.with_copies(cluster, 0, int(count)), global_batch=4, stages=(3,))
    with pytest.raises(NoPlanFits):
        search(what_if.with_copies(cluster, 0, int(count) - 1), global_batch=4, stages=(3,))


def test_checkpointing_is_suggested_only_if_activations_are_too_large():
    full = device(memory=100 * MB, sample_bytes=1000 * MB)
    found = suggestions(cluster_of(full, full))
    assert found[-1].startswith(
        "activation checkpointing or shorter sequences that leave at most 7"
    )
    assert not any(
        "checkpointing" in one for one in suggestions(cluster_of(device(memory=10 * MB)))
    )


@given(seed=st.integers(0, 2**32), stage=st.sampled_from(planning_oracle.STAGES))
@settings(max_examples=40, deadline=None)
def test_the_memory_in_the_suggestion_is_enough(seed, stage):
    """Random clusters; the amounts are parsed from the text of the suggestion."""
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
        suggestion = next(one for one in error.suggestions if " more on " in one)
    else:
        return
    assert search(
        what_if.with_memory(starved, added_by(suggestion)), global_batch=4, stages=(stage,)
    )


def added_by(suggestion: str) -> dict[int, int]:
    added = {}
    for part in suggestion.rpartition(" at stage")[0].split(" and "):
        amount, _, ranks = part.partition(" more on ")
        size, unit = amount.split()
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
