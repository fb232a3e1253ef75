"""Rounding to simple plans: even shares, fewer passes and fewer persistent units, within 2 %."""

from __future__ import annotations

import dataclasses
import random

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from planning_oracle import STAGES
from test_persistent_unit_plans import named, small_memory

from poplar.planner.prediction import predict
from poplar.planner.search import NoPlanFits
from poplar.planner.simple_plans import PREFERENCE, simplified
from poplar.values.plan import Plan, spread


def seconds_of(cluster, plan):
    return predict(cluster, plan).step_seconds


@pytest.mark.parametrize("stage", STAGES)
def test_a_simplified_plan_fits_and_is_nearly_as_fast(stage):
    simpler = 0
    for seed in range(40):
        draw = random.Random(seed)
        cluster = named(planning_oracle.random_cluster(draw, draw.choice((1, 2, 3)), stage))
        request = {"global_batch": draw.randint(1, 30), "stages": (stage,)}
        try:
            fastest = search(cluster, preference=0.0, **request)
        except NoPlanFits:
            continue
        plan = simplified(cluster, fastest)  # predict raises if it does not fit
        assert seconds_of(cluster, plan) <= seconds_of(cluster, fastest) * (1 + PREFERENCE + 1e-9)
        assert plan.global_batch == fastest.global_batch
        assert len(plan.units) <= len(fastest.units)
        simpler += plan != fastest
    assert simpler or stage == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_with_many_passes_gets_the_fewest_equal_ones(stage):
    cluster = cluster_of(device(latency=0.0), device(latency=0.0), communication=0.0)
    plan = Plan(stage=stage, global_batch=24, micro_batches=((3,) * 4,) * 2, shares=(0.5, 0.5))
    assert simplified(cluster, plan).micro_batches == ((12,), (12,))
    limited = simplified(cluster, plan, max_micro_batch=6)
    assert limited.micro_batches == ((6, 6), (6, 6))


def test_uneven_shares_become_even_if_the_step_is_hardly_slower():
    cluster = cluster_of(device(), device(), communication=1e-6)
    plan = Plan(stage=1, global_batch=8, micro_batches=((4,), (4,)), shares=(0.6, 0.4))
    assert simplified(cluster, plan).shares == (0.5, 0.5)


def test_persistent_units_that_save_little_are_dropped():
    cluster = named(small_memory(megabytes=1000, communication=1e-5))
    plan = search(cluster, global_batch=16, stages=(3,), preference=0.0)
    assert len(plan.units) == 8
    assert simplified(cluster, plan).units == ()


def test_a_plan_without_a_simpler_alternative_is_returned_unchanged():
    cluster = cluster_of(device(), device())
    plan = search(cluster, global_batch=32, stages=(0,))
    assert simplified(cluster, plan) is plan
    assert simplified(cluster, plan, preference=0.0) is plan


def test_the_gap_is_relative_to_the_simplified_plan():
    cluster = cluster_of(device(), device(optimizer_seconds=0.02), communication=0.0)
    fastest = search(cluster, global_batch=32, stages=(1,), preference=0.0)
    plan = search(cluster, global_batch=32, stages=(1,))
    assert fastest.prediction["optimality_gap"] == 0.0
    slower = 1 - seconds_of(cluster, fastest) / seconds_of(cluster, plan)
    assert plan.prediction["optimality_gap"] == pytest.approx(slower)
    assert dataclasses.replace(plan, prediction=None) != fastest


def test_samples_are_spread_over_passes_that_differ_by_one_at_most():
    assert spread(7, 3) == (2, 2, 3)
    assert spread(6, 3) == (2, 2, 2)
    assert spread(0, 2) == (0, 0)
