"""Where no plan fits: the missing memory, and the smallest changes with which a plan fits."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import re

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from hypothesis import given
from hypothesis import strategies as st

from poplar.planner import suggested_changes, what_if
from poplar.planner.prediction import memory_needed
from poplar.planner.search import NoPlanFits
from poplar.planner.what_if import DeviceGroup, device_groups
from poplar.values.plan import Plan

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


def test_only_what_the_caller_can_search_for_is_suggested():
    cluster = cluster_of(device(memory=200 * MB), device(memory=66 * MB))
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, stages=(2,), policy="even")
    assert caught.value.suggestions[0] == "stage 3"
    caught.value.allow_only((1, 2))
    assert not any(one.startswith("stage") for one in caught.value.suggestions)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.suggestions == caught.value.suggestions
    again.allow_only((2, 3))  # of those that were left
    assert again.suggestions == caught.value.suggestions


def test_the_exact_policy_is_suggested_unless_the_caller_rules_out_policies():
    cluster = cluster_of(device(memory=200 * MB), device(memory=66 * MB))
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=4, stages=(2,), policy="even")
    assert "policy exact at stage 2" in caught.value.suggestions
    assert search(cluster, global_batch=4, stages=(2,)).shares[0] > 0.5
    caught.value.allow_only((2,), policies=False)
    assert not any("policy" in one or "host" in one for one in caught.value.suggestions)
    assert any("rank 1's memory" in one for one in caught.value.suggestions)


@pytest.mark.parametrize(("policy", "stage"), [("exact", 0), ("even", 1), ("exact", 2)])
@pytest.mark.parametrize("sizes", [(10, 20), (10, 10)])
def test_the_suggested_memory_is_the_least_that_fits(policy, stage, sizes):
    cluster = cluster_of(*(device(memory=size * MB) for size in sizes))
    wanted = {"stages": (stage,), "policy": policy}
    (suggestion,) = [one for one in suggestions(cluster, **wanted) if "memory" in one]
    ranks, mebibytes = added_by(suggestion)
    assert search(with_memory(cluster, ranks, mebibytes), global_batch=4, **wanted).stage == stage
    with pytest.raises(NoPlanFits):
        search(with_memory(cluster, ranks, mebibytes - 1), global_batch=4, **wanted)


def test_memory_is_suggested_for_the_group_that_needs_the_least_in_total():
    cluster = cluster_of(*[device(name="A")] * 2, *[device(memory=10 * MB, name="B")] * 2)
    (suggestion,) = [one for one in suggestions(cluster, stages=(0,)) if "memory" in one]
    assert suggestion.startswith("memory of ranks 2-3 +")
    assert suggestion.endswith(" MiB each at stage 0")


def test_leaving_out_ranks_that_are_too_small_is_suggested():
    cluster = cluster_of(device(), device(memory=10 * MB), device(), device(memory=10 * MB))
    found = suggestions(cluster, stages=(0, 1))
    without = next(one for one in found if one.startswith("without ranks 1, 3 at stage "))
    stage = int(without[-1])
    smaller = what_if.without(cluster, (1, 3)).cluster
    assert search(smaller, global_batch=4, stages=(stage,)).stage == stage


def test_the_suggested_number_of_devices_is_the_least_that_fits():
    small = device(memory=room_for(4, stage=3), name="A")
    cluster = cluster_of(small, small)
    suggestion = next(one for one in suggestions(cluster, stages=(3,)) if " A at" in one)
    count = int(suggestion.removeprefix("devices +").removesuffix(" A at stage 3"))

    def with_devices(copies):
        (group,) = device_groups(cluster)
        return what_if.more_devices(cluster, group, copies).cluster

    assert search(with_devices(count), global_batch=4, stages=(3,))
    with pytest.raises(NoPlanFits):
        search(with_devices(count - 1), global_batch=4, stages=(3,))


def test_checkpointing_is_suggested_only_if_activations_are_too_large():
    full = device(memory=100 * MB, sample_bytes=1000 * MB)
    found = suggestions(cluster_of(full, full))
    assert found[-1].startswith("activations at most 7")
    assert "(activation checkpointing or shorter sequences) at stage" in found[-1]
    assert not any(
        "checkpointing" in one for one in suggestions(cluster_of(device(memory=10 * MB)))
    )


@given(seed=st.integers(0, 2**32), stage=st.sampled_from(planning_oracle.STAGES))
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
        suggestion = next(one for one in error.suggestions if "memory" in one)
    else:
        return
    larger = with_memory(starved, *added_by(suggestion))
    assert search(larger, global_batch=4, stages=(stage,))


def with_memory(cluster, ranks, mebibytes):
    return what_if.more_memory(cluster, DeviceGroup("", tuple(ranks)), mebibytes).cluster


def added_by(suggestion: str) -> tuple[range, int]:
    """The ranks and MiB of `memory of ranks 0-3 +8.0 MiB each at stage 1`."""
    whose, _, amount = suggestion.rpartition(" at stage")[0].partition(" +")
    size, unit = amount.removesuffix(" each").split()
    mebibytes = round(float(size) * {"MiB": 1, "GiB": 1024}[unit])
    first, *last = map(int, re.findall(r"\d+", whose))
    return range(first, (last or [first])[0] + 1), mebibytes


def test_a_small_memory_limit_is_written_in_kib():
    with pytest.raises(NoPlanFits, match=r"may use 18\.6 KiB of 19\.5 KiB"):
        search(cluster_of(device(memory=20_000)), global_batch=4)


def test_suggestions_are_computed_when_they_are_read(monkeypatch):
    computed = []
    monkeypatch.setattr(
        "poplar.planner.stage_search.suggested_changes",
        lambda *arguments, **_: computed.append(arguments) or ("a larger machine",),
    )
    with pytest.raises(NoPlanFits) as caught:
        search(cluster_of(device(memory=10 * MB)), global_batch=4)
    assert not computed
    assert str(caught.value).endswith("what would fit: a larger machine")
    assert str(caught.value)
    assert len(computed) == 1


@pytest.mark.parametrize("ranks", [3, 40])
def test_the_device_without_which_a_plan_fits_is_named(ranks):
    """Also in a large cluster, where devices of a group count as the smallest of them."""
    memories = [100 * MB] * (ranks - 1)
    memories.insert(1, 8 * MB)
    cluster = cluster_of(*(device(memory=memory) for memory in memories))
    assert any(one.startswith("without rank 1 ") for one in suggestions(cluster, stages=(3,)))


def test_groups_that_cannot_be_the_smallest_change_are_tried_once(monkeypatch):
    """The message of six groups does not cost six times as much as that of one."""
    tried = []
    missing = suggested_changes.request_shortfall
    monkeypatch.setattr(
        "poplar.planner.suggested_changes.request_shortfall",
        lambda costs, request: tried.append(costs) or missing(costs, request),
    )

    def count(groups):
        tried.clear()
        equal = (device(memory=7 * MB, name=f"device {number}") for number in range(groups))
        assert any("memory" in one for one in suggestions(cluster_of(*equal), stages=(3,)))
        return len(tried)

    assert count(6) < 3 * count(1), (count(6), count(1))
