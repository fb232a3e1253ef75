"""The baseline policies fit in memory, follow their definition and do not beat the search."""

from __future__ import annotations

import dataclasses
import random

import planning_oracle
import pytest
from all_ranks import alternatives, search
from clusters import cluster_of, device
from planning_oracle import STAGES, Oracle
from subset import choose
from test_search import seconds_of

from poplar.planner.search import POLICIES, NoPlanFits
from poplar.values.plan import Plan

MB = 10**6


def unequal(**changes):
    """Three ranks whose peak FLOP/s do not match their measured speeds."""
    return cluster_of(
        device(4.0, peak_flops=3e12),
        device(2.0, peak_flops=2e12),
        device(peak_flops=1e12),
        **changes,
    )


def with_peaks(cluster, draw):
    devices = tuple(
        dataclasses.replace(device, peak_flops=draw.choice((1e12, 2e12)))
        for device in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


@pytest.mark.parametrize("stage", STAGES)
def test_every_policy_fits_in_memory_and_is_not_faster_than_the_search(stage):
    decided, seeds = 0, choose(quick=65, full=260)
    for seed in range(seeds):
        draw = random.Random(7 * seed + stage)
        cluster = planning_oracle.random_cluster(draw, draw.choice((1, 2, 3, 4)), stage)
        cluster = with_peaks(cluster, draw)
        wanted = {"global_batch": draw.randint(1, 20), "stages": (stage,)}
        oracle = Oracle(cluster, stage)

        def fits(plan, slack=0.0, oracle=oracle):
            return oracle.fits(plan.micro_batches, plan.shares, slack=slack)

        for policy in POLICIES:
            try:
                plan = search(cluster, policy=policy, **wanted)
            except NoPlanFits:
                assert not any(map(fits, smallest_plans(policy, cluster.world_size, **wanted)))
                continue
            decided += 1
            assert fits(plan, slack=1.0)
            assert plan.prediction["policy"] == policy
            best = search(cluster, preference=0.0, **wanted)
            assert seconds_of(best) <= seconds_of(plan) * (1 + 1e-9)
    assert decided > seeds


def smallest_plans(policy, ranks, global_batch, stages):
    """Plans with even shares, one of which fits if any plan of the policy with several passes
    does.
    """
    if policy == "even":
        return [Plan.even(ranks, min(2 * ranks, global_batch), 1, *stages)]
    alone = ([int(rank == own) for rank in range(ranks)] for own in range(ranks))
    passes = min(2, global_batch)
    return [Plan.manual(batches, stage=stages[0], passes=passes) for batches in alone]


@pytest.mark.parametrize("stage", STAGES)
def test_even_uses_the_largest_micro_batch_that_the_smallest_rank_can_hold(stage):
    small = device(memory=116 * MB, sample_bytes=MB)
    plan = search(cluster_of(device(), small), global_batch=64, stages=(stage,), policy="even")
    largest = max(map(max, plan.micro_batches))
    assert plan == Plan.even(2, 64, largest, stage)
    assert Oracle(cluster_of(small, small), stage).fits(plan.micro_batches, (0.5, 0.5))
    if largest < small.max_batch:
        larger = Plan.even(2, 64, largest + 1, stage)
        assert not Oracle(cluster_of(small, small), stage).fits(larger.micro_batches, (0.5, 0.5))


@pytest.mark.parametrize("stage", STAGES)
def test_even_needs_every_rank_to_hold_a_sample(stage):
    full = device(memory=100 * MB, sample_bytes=1000 * MB)
    with pytest.raises(NoPlanFits, match=r"rank 1 \(device of speed 1.0\) .* for one sample"):
        search(cluster_of(device(), full), global_batch=8, stages=(stage,), policy="even")


@pytest.mark.parametrize("stage", STAGES)
def test_even_with_fewer_samples_than_ranks_gives_the_first_ranks_one_each(stage):
    few = {"global_batch": 2, "stages": (stage,), "policy": "even"}
    plan = search(cluster_of(device(), device(), device()), **few)
    assert [plan.samples(rank) for rank in range(3)] == [1, 1, 0]
    assert seconds_of(plan) > 0
    # A rank without samples needs no memory for one.
    full = device(sample_bytes=10**6 * MB)
    assert search(cluster_of(device(), device(), full), **few) == plan
    with pytest.raises(NoPlanFits, match=r"rank 1 \(device of speed 1.0\) .* for one sample"):
        search(cluster_of(device(), full, device()), **few)


def test_only_the_exact_search_reports_an_optimality_gap():
    for policy in POLICIES:
        plan = search(unequal(), global_batch=18, policy=policy)
        assert plan.prediction["optimality_gap"] == (0.0 if policy == "exact" else None)


@pytest.mark.parametrize("stage", STAGES)
def test_flops_gives_samples_in_proportion_to_peak_flops(stage):
    plan = search(unequal(), global_batch=18, stages=(stage,), policy="flops")
    assert [plan.samples(rank) for rank in range(3)] == [9, 6, 3]


def test_flops_without_peak_flops_raises():
    with pytest.raises(ValueError, match=r"rank 0 \(device of .*\): the profile has no peak"):
        search(cluster_of(device()), global_batch=8, policy="flops")
    with pytest.raises(ValueError, match="the profile has no peak"):
        search(cluster_of(device(memory=10**6)), global_batch=8, policy="flops")


@pytest.mark.parametrize("stage", [0, 1])
def test_paper_gives_samples_in_proportion_to_speed_at_stages_0_and_1(stage):
    plan = search(unequal(), global_batch=70, stages=(stage,), policy="paper")
    assert [plan.samples(rank) for rank in range(3)] == [40, 20, 10]
    assert plan.micro_batches == ((8, 16, 16), (4, 16), (10,))


@pytest.mark.parametrize("stage", [2, 3])
def test_paper_sweeps_a_time_limit_per_pass_at_stages_2_and_3(stage):
    plan = search(unequal(), global_batch=56, stages=(stage,), policy="paper")
    assert len({plan.passes(rank) for rank in range(3)}) == 1
    assert all(list(own) == sorted(own) for own in plan.micro_batches)
    assert plan.samples(0) > plan.samples(1) > plan.samples(2)


def test_the_search_balances_unequal_devices():
    cluster = unequal(communication=0.0)
    wanted = {"global_batch": 42, "stages": (1,)}
    even = seconds_of(search(cluster, policy="even", **wanted))
    assert even / seconds_of(search(cluster, **wanted)) > 1.8


def test_alternatives_come_from_the_requested_policy():
    plans = alternatives(unequal(), global_batch=24, policy="even")
    assert {plan.stage for plan in plans} == set(STAGES)
    assert {plan.prediction["policy"] for plan in plans} == {"even"}


@pytest.mark.parametrize("stage", STAGES)
def test_even_shares_gives_the_fastest_batches_beside_even_shares(stage):
    cluster = unequal()
    request = {"global_batch": 42, "stages": (stage,)}
    plan = search(cluster, policy="even_shares", **request)
    assert plan.shares == (1 / 3,) * 3
    assert not plan.units
    even = seconds_of(search(cluster, policy="even", **request))
    fastest = seconds_of(search(cluster, preference=0.0, **request))
    assert fastest * (1 - 1e-9) <= seconds_of(plan) < even
