"""At stage 3 the planner makes units persistent if that makes a step faster."""

from __future__ import annotations

import dataclasses
import random

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from planning_oracle import Oracle
from subset import choose
from test_search import seconds_of, some_shares

from poplar.planner.persistent_units import persistence_order
from poplar.planner.prediction import predict
from poplar.planner.search import NoPlanFits
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, ModelProfile

LARGEST_GLOBAL_BATCH = {1: 8, 2: 5, 3: 3}
MB = 10**6


def named(cluster: ClusterProfile) -> ClusterProfile:
    """With unit names: units without names cannot be persistent."""
    names = tuple(f"unit {unit}" for unit in range(len(cluster.model.unit_numels)))
    return dataclasses.replace(cluster, model=dataclasses.replace(cluster.model, unit_names=names))


def persistent_of(plan: Plan) -> frozenset[int]:
    return frozenset(int(unit.name.split()[1]) for unit in plan.units if unit.persistent)


def small_memory(*, megabytes: int, communication: float = 0.05) -> ClusterProfile:
    """Two ranks whose passes hold two samples at most, and eight units of 1 MB each."""
    small = device(memory=megabytes * MB, sample_bytes=MB // 10, largest=2)
    model = ModelProfile(unit_numels=(250_000,) * 8)
    return cluster_of(small, small, model=model, communication=communication)


def chosen(cluster: ClusterProfile, global_batch: int = 16, **wanted) -> Plan:
    return search(cluster, global_batch=global_batch, stages=(3,), **wanted)


def test_all_units_are_persistent_if_memory_allows():
    cluster = small_memory(megabytes=1000)
    plain, persistent = chosen(cluster), chosen(named(cluster))
    assert not plain.units
    assert persistent_of(persistent) == frozenset(range(8))
    # The whole model is unsharded once a step, instead of 15/8 of it in each of four passes.
    assert seconds_of(plain) - seconds_of(persistent) == pytest.approx(0.05 * (4 * 15 / 8 - 1))
    assert predict(named(cluster), persistent).step_seconds == seconds_of(persistent)


def test_some_units_are_persistent_if_memory_is_tight():
    sizes = (25, 27, 28, 29, 40)
    plans = [chosen(named(small_memory(megabytes=size))) for size in sizes]
    counts = [len(persistent_of(plan)) for plan in plans]
    assert counts == sorted(counts)
    assert 0 < counts[1] < counts[2] < 8
    for plan, size in zip(plans, sizes, strict=True):
        assert max(plan.prediction["memory_bytes"]) <= size * MB


def test_no_unit_is_persistent_if_that_saves_no_time():
    assert not chosen(named(small_memory(megabytes=1000, communication=0.0))).units


def test_other_stages_and_policies_have_no_persistent_units():
    cluster = named(small_memory(megabytes=1000))
    assert not chosen(cluster, policy="even").units
    for stage in (0, 1, 2):
        assert not search(cluster, global_batch=16, stages=(stage,)).units


def test_the_plan_prints_the_number_of_persistent_units():
    assert "8 persistent units" in str(chosen(named(small_memory(megabytes=999))))


CASES = choose(quick=12, full=40)


@pytest.mark.parametrize("first_seed", [80, 120])
def test_no_number_of_persistent_units_is_faster(first_seed):
    found = 0
    for seed in range(first_seed, first_seed + CASES):
        draw = random.Random(seed)
        ranks = draw.choice((1, 2, 2, 3))
        cluster = named(planning_oracle.random_cluster(draw, ranks, 3))
        global_batch = draw.randint(1, LARGEST_GLOBAL_BATCH[ranks])
        try:
            plan = chosen(cluster, global_batch, preference=0.0)
        except NoPlanFits:
            continue
        found += 1
        own = Oracle(cluster, 3, persistent_of(plan))
        assert own.fits(plan.micro_batches, plan.shares, slack=1.0), seed
        assert seconds_of(plan) == pytest.approx(own.seconds(plan.micro_batches, plan.shares)), seed
        least = seconds_of(plan) * (1 - plan.prediction["optimality_gap"])
        order = list(persistence_order(cluster.model))
        for count in range(len(order) + 1):
            oracle = Oracle(cluster, 3, frozenset(order[:count]))
            shares = some_shares(oracle, global_batch, draw)[:12]
            assert oracle.best(global_batch, shares) >= least * (1 - 1e-9), (seed, count)
    assert found > CASES / 2


@pytest.mark.parametrize("global_batch", [16, 24, 32])
def test_persistent_units_of_many_sizes_are_not_slower(global_batch):
    """Communication overlaps with windows of many different lengths."""
    model = ModelProfile(unit_numels=tuple(250_000 * size for size in (1, 9, 2, 30, 4, 17, 3, 11)))
    ample = device(memory=4000 * MB, sample_bytes=MB // 10, largest=4)
    cluster = named(cluster_of(ample, ample, model=model, communication=0.2, overlap=1.0))
    plan = chosen(cluster, global_batch)
    assert seconds_of(plan) <= seconds_of(chosen(cluster_without_names(cluster), global_batch))


def cluster_without_names(cluster: ClusterProfile) -> ClusterProfile:
    return dataclasses.replace(cluster, model=dataclasses.replace(cluster.model, unit_names=()))
