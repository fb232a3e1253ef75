"""The planner keeps optimizer state in host memory on ranks whose memory that frees for more."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from all_ranks import search
from clusters import cluster_of, device
from planning_oracle import STAGES, Oracle, random_cluster, share_grid
from test_search import seconds_of
from test_suggested_changes import added_by, with_memory

from poplar.planner.calibration import plans_to_observe
from poplar.planner.explain import explain
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import DoesNotFit, fits, memory_needed, predict
from poplar.simulator.step_simulation import simulate
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, DeviceProfile, ModelProfile

MB = 10**6
MODEL = ModelProfile(
    unit_numels=(250_000,) * 4, param_bytes=2.0, grad_bytes=2.0, optimizer_bytes=12.0
)
STATE = 12.0 * MODEL.numel


def with_host(one: DeviceProfile, *, slower: float = 10.0, memory: int = 10**12) -> DeviceProfile:
    """The device with host memory, in which updates take this many times as long."""
    seconds = slower * max(0.01, one.optimizer_seconds - one.optimizer_latency_seconds)
    return dataclasses.replace(one, host_optimizer_seconds=seconds, host_memory_bytes=memory)


def unequal(small: int, **host) -> ClusterProfile:
    """Equal speeds; one rank with 100 MB and one with `small` bytes."""
    changes = {"largest": 8, "optimizer_seconds": 0.004}
    devices = [device(memory=one, **changes) for one in (100 * MB, small)]
    devices = [with_host(one, **host) for one in devices]
    return cluster_of(*devices, model=MODEL, memory_reserve=0.0)


def found(cluster: ClusterProfile, global_batch: int = 16, **wanted) -> Plan | None:
    try:
        return search(cluster, global_batch=global_batch, **wanted)
    except NoPlanFits:
        return None


def assert_least_on_host(cluster: ClusterProfile, plan: Plan) -> None:
    """The plan fits, and would not if a rank kept less state in host memory."""
    predict(cluster, plan)
    for rank, part in enumerate(plan.host_state):
        parts = list(plan.host_state)
        parts[rank] = part - 0.002
        if part > 0.002 and plan.shares[rank] > 0.0:
            assert not fits(cluster, dataclasses.replace(plan, host_state=tuple(parts)))


# What is chosen


def test_the_small_rank_keeps_state_on_the_host_and_the_large_one_does_not():
    cluster = unequal(14 * MB)
    for stage in (1, 2):
        assert found(cluster, stages=[stage], host_state="never").host_state == ()
    assert found(cluster, stages=[0], host_state="never") is None
    plan = found(cluster, stages=[0])
    assert plan.host_state[0] == 0.0 < plan.host_state[1]
    assert_least_on_host(cluster, plan)
    # A pass of 8 samples takes 8 MB.
    assert memory_needed(cluster, plan)[1] <= 14 * MB
    assert "state on host" in str(plan)


@pytest.mark.parametrize("stage", STAGES)
def test_calibration_runs_plans_with_the_state_where_a_search_puts_it(stage):
    cluster = unequal(14 * MB)
    plans = plans_to_observe(cluster, stage)
    assert [plan.passes(0) for plan in plans] == [1, 3]
    for plan in plans:
        predict(cluster, plan)
        assert any(plan.host_state) == (stage == 0)


def test_more_samples_at_a_time_are_worth_an_update_on_the_host():
    """At stage 3 each pass communicates, and samples need the memory of a rank's state."""
    cluster = unequal(13 * MB, slower=2.0)
    cluster = dataclasses.replace(
        cluster,
        network=dataclasses.replace(
            cluster.network, all_gather_seconds=0.1, reduce_scatter_seconds=0.1
        ),
        devices=tuple(
            dataclasses.replace(one, memory_bytes=memory)
            for one, memory in zip(cluster.devices, (20 * MB, 13 * MB), strict=True)
        ),
    )
    never, auto = (found(cluster, stages=[3], host_state=h) for h in ("never", "auto"))
    assert seconds_of(auto) < 0.5 * seconds_of(never)
    assert any(auto.host_state)
    assert auto.passes(0) < never.passes(0)
    assert_least_on_host(cluster, auto)


def test_the_host_may_be_too_small():
    """Its memory limits what a rank keeps there: 22 bytes an element, of which 12 are saved."""
    plan = found(unequal(14 * MB), stages=[0])
    needed = plan.host_state[1] * MODEL.numel * (12 + 4 + 4 + 2 - 4)
    assert found(unequal(14 * MB, memory=math.ceil(1.01 * needed)), stages=[0]) is not None
    assert found(unequal(14 * MB, memory=math.floor(0.5 * needed)), stages=[0]) is None


def test_what_was_not_measured_is_not_planned():
    cluster = unequal(14 * MB)
    plan = found(cluster, stages=[0])
    plain = [dataclasses.replace(one, host_optimizer_seconds=None) for one in cluster.devices]
    cluster = dataclasses.replace(cluster, devices=tuple(plain))
    assert found(cluster, stages=[0]) is None
    with pytest.raises(ValueError, match=r"rank 1 .* in host memory, but the profile has no"):
        predict(cluster, plan)


def test_errors_name_it():
    cluster = unequal(14 * MB)
    with pytest.raises(NoPlanFits, match=r"state in host memory \(host_state='auto'\) at stage 0"):
        search(cluster, global_batch=16, stages=[0], host_state="never")
    with pytest.raises(NoPlanFits, match="with the optimizer state, as far as possible in host"):
        search(unequal(2 * MB), global_batch=16, stages=[0])
    with pytest.raises(ValueError, match="host_state must be one of auto, never"):
        search(cluster, global_batch=16, host_state="always")
    plan = found(cluster, stages=[0])
    less = dataclasses.replace(plan, host_state=(0.0, 0.1))
    with pytest.raises(DoesNotFit, match="as far as possible in host memory"):
        predict(cluster, less)


def test_suggestions_count_on_state_in_host_memory():
    """Rank 1 can hold its state in host memory only: more memory is suggested for the rest."""
    with pytest.raises(NoPlanFits, match=r"state in host memory \(host_state='auto'\) at stage 0"):
        search(unequal(13 * MB), global_batch=16, stages=[0], host_state="never")
    with pytest.raises(NoPlanFits, match=r"policy exact with state in host memory \(host_state"):
        search(unequal(13 * MB), global_batch=16, stages=[0], policy="even")
    cluster = unequal(2 * MB)
    with pytest.raises(NoPlanFits) as caught:
        search(cluster, global_batch=16, stages=[0])
    ranks, mebibytes = added_by(next(one for one in caught.value.suggestions if "memory" in one))
    assert found(with_memory(cluster, ranks, mebibytes), stages=[0]) is not None
    assert found(with_memory(cluster, ranks, mebibytes - 1), stages=[0]) is None


def test_it_is_predicted_simulated_and_explained():
    cluster = unequal(14 * MB)
    plan = found(cluster, stages=[0])
    part = plan.host_state[1]
    seconds = 0.004 * (1.0 - part) + 0.1 * part
    assert predict(cluster, plan).optimizer_seconds == pytest.approx((0.004, seconds))
    assert simulate(cluster, plan).step_seconds == pytest.approx(seconds_of(plan), rel=0.05)
    sentences = explain(cluster, plan, stages=[0]).sentences()
    assert any("host memory" in sentence and "rank 1" in sentence for sentence in sentences)


# Against all plans


def hosted_cluster(draw: random.Random, ranks: int, stage: int) -> ClusterProfile:
    cluster = random_cluster(draw, ranks, stage, tight=True)
    factor = draw.choice((0.4, 0.6, 0.8, 1.0))
    devices = [
        with_host(
            dataclasses.replace(one, memory_bytes=round(factor * one.memory_bytes)),
            slower=draw.choice((2.0, 10.0, 40.0)),
        )
        for one in cluster.devices
    ]
    model = dataclasses.replace(cluster.model, optimizer_bytes=12.0)
    return dataclasses.replace(cluster, devices=tuple(devices), model=model)


@pytest.mark.parametrize("first_seed", [0, 20])
def test_it_is_never_slower_than_without(first_seed: int):
    hosting = 0
    for seed in range(first_seed, first_seed + 20):
        draw = random.Random(seed)
        cluster = hosted_cluster(draw, draw.randint(2, 3), draw.choice(STAGES))
        batch = draw.randint(2, 9)
        never, auto = (found(cluster, batch, host_state=h) for h in ("never", "auto"))
        if never is not None:
            assert auto is not None
            assert seconds_of(auto) <= seconds_of(never) * (1.0 + 1e-9)
        if auto is not None and auto.host_state:
            hosting += 1
            assert_least_on_host(cluster, auto)
    assert hosting


def best_of_all(cluster: ClusterProfile, stage: int, batch: int) -> float:
    """The least seconds over all batches and a grid of shares, with the state in host memory that
    each rank then needs."""
    plain, model = Oracle(cluster, stage), cluster.model
    best = math.inf
    for batches in plain.every_batches(batch):
        for shares in share_grid(cluster.world_size, 6) if stage else [(1.0,) * len(batches)]:
            devices = []
            for rank, (one, share) in enumerate(zip(cluster.devices, shares, strict=True)):
                missing = plain.needed_by(rank, batches[rank], share) - plain.limit(rank)
                state = model.optimizer_bytes * model.numel * share
                part = max(0.0, missing) / state if state else math.inf if missing > 0 else 0.0
                if part > 1.0:
                    break
                latency = min(one.optimizer_latency_seconds, one.optimizer_seconds)
                update = (1 - part) * (one.optimizer_seconds - latency)
                seconds = latency + update + part * one.host_optimizer_seconds
                changes = {"optimizer_seconds": seconds, "optimizer_latency_seconds": latency}
                devices.append(dataclasses.replace(one, **changes))
            if len(devices) == cluster.world_size:
                changed = dataclasses.replace(cluster, devices=tuple(devices))
                seconds = Oracle(changed, stage).seconds(batches, shares)
                best = min(best, seconds)
    return best


@pytest.mark.parametrize("stage", STAGES)
def test_no_plan_is_much_faster(stage: int):
    hosting = 0
    for seed in range(12):
        draw = random.Random(seed)
        cluster = hosted_cluster(draw, 2, stage)
        plan = found(cluster, 3, stages=[stage], preference=0.0)
        best = best_of_all(cluster, stage, 3)
        assert (plan is not None) or math.isinf(best)
        if plan is not None:
            hosting += bool(plan.host_state)
            assert seconds_of(plan) <= 1.02 * best
    assert hosting
