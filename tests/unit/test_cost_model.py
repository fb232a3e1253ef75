"""`predict` follows DESIGN section 4: seconds, bytes, and what bounds a step."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import planning_oracle
import pytest
from clusters import cluster_of, device
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planning_oracle import STAGES, Oracle
from test_plan import random_plan

from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import describe, memory_needed, predict
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import BatchPoint, ClusterProfile, ModelProfile

MIB = 2**20


def a_cluster(**changes) -> ClusterProfile:
    """Two ranks, the second of half the speed, whose numbers are easy to add up by hand."""
    speeds = {"fast": 1.0, "slow": 0.5}
    devices = (
        device(
            speed,
            name=name,
            memory=1000 * MIB,
            latency=0.0,
            sample=0.1,
            batches=(1, 8),
            sample_bytes=10 * MIB,
            optimizer_seconds=0.08,
        )
        for name, speed in speeds.items()
    )
    return cluster_of(
        *devices,
        units=(MIB, 2 * MIB, MIB, MIB),
        communication=0.06,
        gather=0.04,
        **{"memory_reserve": 0.0, **changes},
    )


def a_plan(stage: int, **changes) -> Plan:
    fields = {
        "stage": stage,
        "global_batch": 9,
        "micro_batches": ((2, 4), (1, 2)),
        "shares": (0.5, 0.5),
    }
    return Plan(**{**fields, **changes})


def changed(cluster: ClusterProfile, rank: int, **changes) -> ClusterProfile:
    devices = list(cluster.devices)
    devices[rank] = dataclasses.replace(devices[rank], **changes)
    return dataclasses.replace(cluster, devices=tuple(devices))


# Seconds, by hand


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        (0, 0.6 + 0.06 + 0.04 + 0.08),
        (1, 0.6 + 0.06 + 0.04 + 0.04),
        (2, (0.2 + 0.06) + (0.4 + 0.06) + 0.04 + 0.04),
        # The last of five parts is still unsharded when the backward begins.
        (3, (0.2 + 0.132) + (0.4 + 0.132) + 0.04),
    ],
)
def test_without_overlap_a_step_is_the_sum_of_its_parts(stage, seconds):
    prediction = predict(a_cluster(), a_plan(stage))
    assert prediction.step_seconds == pytest.approx(seconds)
    assert prediction.samples_per_second == pytest.approx(9 / seconds)
    assert prediction.compute_seconds == pytest.approx((0.6, 0.6))
    assert prediction.optimizer_seconds == pytest.approx((0.08 if stage == 0 else 0.04,) * 2)
    whole = sum((prediction.compute_seconds[0], prediction.optimizer_seconds[0]))
    assert prediction.communication_seconds == pytest.approx(seconds - whole)
    assert prediction.busy_fraction == pytest.approx((whole / seconds,) * 2)


FOUR_BUFFERS = ModelProfile(unit_numels=(8 * MIB,) * 4)
"""Units that are communicated one by one at every stage."""


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        # Three quarters of a reduction may overlap, and two quarters of the gather after it.
        (0, 0.6 + (0.06 - 0.045) + (0.04 - 0.02) + 0.08),
        (1, 0.6 + (0.06 - 0.045) + 0.04 + 0.04),
        # The rest of the first reduction runs under the second pass's forward.
        (2, 0.6 + (0.06 - 0.045) + 0.04 + 0.04),
        # The first unit's gather and its reduction.
        (3, 0.6 + 2 * (0.01 + 0.015) + 0.04),
    ],
)
def test_with_overlap_only_one_unit_is_exposed(stage, seconds):
    cluster = a_cluster(overlap=1.0, model=FOUR_BUFFERS)
    assert predict(cluster, a_plan(stage)).step_seconds == pytest.approx(seconds)


@given(seed=st.integers(0, 2**32))
@example(489)  # the last unit, which comes after a resident one, has nothing to train
@example(589)  # nor has the first one here
@example(2235)
def test_persistent_units_cost_the_same_as_in_the_oracle(seed):
    draw = random.Random(seed)
    cluster = planning_oracle.random_cluster(draw, draw.choice((1, 2, 3)), 3)
    units = len(cluster.model.unit_numels)
    names = tuple(f"unit {unit}" for unit in range(units))
    persistent = frozenset(draw.sample(range(units), draw.randint(1, units)))
    cluster = dataclasses.replace(
        cluster,
        model=dataclasses.replace(cluster.model, unit_names=names),
        devices=tuple(dataclasses.replace(d, memory_bytes=10**12) for d in cluster.devices),
    )
    passes = draw.randint(1, 3)
    plan = dataclasses.replace(
        Plan.even(cluster.world_size, passes * cluster.world_size, 1, 3),
        units=tuple(UnitPlan(names[unit], persistent=True) for unit in sorted(persistent)),
    )
    oracle, prediction = Oracle(cluster, 3, persistent), predict(cluster, plan)
    assert prediction.step_seconds == pytest.approx(
        oracle.seconds(plan.micro_batches, plan.shares), rel=1e-9
    )
    for rank, needed in enumerate(prediction.memory_bytes):
        expected = oracle.needed_by(rank, plan.micro_batches[rank], plan.shares[rank])
        assert needed == pytest.approx(expected, abs=1.0)


def test_a_rank_without_passes_is_accepted():
    prediction = predict(a_cluster(), a_plan(1, micro_batches=((1, 8), ())))
    assert prediction.compute_seconds == pytest.approx((0.9, 0.0))
    assert prediction.busy_fraction[1] == pytest.approx(0.04 / prediction.step_seconds)


@pytest.mark.parametrize("stage", STAGES)
def test_negative_residuals_leave_at_least_the_compute(stage):
    cluster = a_cluster()
    network = dataclasses.replace(
        cluster.network, synchronization_seconds=(-9.0,) * 4, step_seconds=(-9.0,) * 4
    )
    cluster = dataclasses.replace(cluster, network=network)
    prediction = predict(cluster, a_plan(stage))
    assert prediction.step_seconds == pytest.approx(0.6)
    for rank in range(2):
        cluster = changed(cluster, rank, pass_overhead_seconds=(-9.0,) * 4)
    prediction = predict(cluster, a_plan(stage))
    assert prediction.step_seconds == 0.0
    assert prediction.samples_per_second == math.inf


@given(seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_random_plans_cost_the_same_as_in_the_oracle(seed):
    plan = random_plan(seed)
    draw = random.Random(seed)
    assume(max(max(own, default=0) for own in plan.micro_batches) <= 20)
    cluster = planning_oracle.random_cluster(draw, plan.world_size, plan.stage)
    last = BatchPoint(batch=20, seconds=9.0, activation_bytes=10**7)
    if cluster.devices[0].points[0].unit_bytes:
        by_unit = (10**7,) * len(cluster.model.unit_numels)
        last = dataclasses.replace(last, unit_bytes=by_unit, bytes_after_unit=by_unit)
    for rank in range(plan.world_size):
        points = (*cluster.devices[rank].points, last)
        cluster = changed(cluster, rank, points=points, memory_bytes=10**12)
    oracle = Oracle(cluster, plan.stage)
    prediction = predict(cluster, plan)
    assert prediction.step_seconds == pytest.approx(
        oracle.seconds(plan.micro_batches, plan.shares), rel=1e-9
    )
    for rank, own in enumerate(plan.micro_batches):
        needed = oracle.needed_by(rank, own, plan.shares[rank])
        assert prediction.memory_bytes[rank] == pytest.approx(needed, abs=1.0)
        assert 0.0 <= prediction.busy_fraction[rank] <= 1.0


# Bytes


SQUARES = 1 / 16
"""Bytes per element of a rank's slice: a sum of squares for every 64 elements."""


@pytest.mark.parametrize(
    ("stage", "state", "alive"),
    [
        # One buffer of 5 Mi elements: its sums, and its gradients when the backward is over.
        (0, 5 * 12, 5 * (4 + SQUARES / 2) + 4 * 5),
        (1, 5 * (4 + 8 * 0.25), 5 * (4 + 0.25 * SQUARES) + 4 * 5),
        # Slices of the sums, gradients, their bucket, and the previous pass's with two received.
        (2, 5 * (4 + 8 * 0.25), 0.25 * 5 * (4 + SQUARES) + 4 * 5 * (1 + 1 + 1 + 2 * 0.25)),
        # Buckets of the previous pass's last units, the last unit's gradients, two units' values.
        (3, 5 * 12 * 0.25, 0.25 * 5 * (4 + SQUARES) + 4 * (3 * (1 + 2 * 0.25) + 1) + 4 * 3),
    ],
)
def test_the_peak_is_what_is_alive_at_one_moment_of_a_later_pass(stage, state, alive):
    cluster = a_cluster()
    plan = a_plan(stage, shares=(0.25, 0.75))
    expected = state + alive + 40
    assert memory_needed(cluster, plan)[0] == expected * MIB
    held = changed(cluster, 0, held_bytes=7)
    frozen = dataclasses.replace(held, model=dataclasses.replace(held.model, frozen_bytes=5))
    assert memory_needed(frozen, plan)[0] == expected * MIB + 12


def test_a_large_parameter_is_one_bucket():
    model = ModelProfile(unit_numels=(64 * MIB,), merged_buffers=((40 * MIB, 24 * MIB),))
    alive = 4 * 64 * (1 + 2 * 0.5) + 4 * 24 + 4 * 64  # 24 Mi elements are left for a second bucket
    expected = 64 * (4 + 8 * 0.5 + (4 + SQUARES) * 0.5) + alive + 40
    assert memory_needed(a_cluster(model=model), a_plan(2))[0] == expected * MIB


@pytest.mark.parametrize("stage", [0, 1])
def test_16_bit_gradients_need_packed_buckets(stage):
    model = dataclasses.replace(a_cluster().model, wire_bytes=2, grad_bytes=1)
    own = 0.5
    state = 5 * (4 + 8 * (1.0 if stage == 0 else own)) + 5 * (4 + own * SQUARES)
    expected = state + 2 * 5 * (1 + 2 * own) + 40
    assert memory_needed(a_cluster(model=model), a_plan(stage))[0] == expected * MIB


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit_frozen_bytes": (1,)}, "unit_frozen_bytes must have 2 entries or none, got 1"),
        ({"resident_units": (2,)}, "resident_units must be of units 0 to 1"),
        ({"merged_buffers": ((11, 0),)}, r"merged_buffers\[0\]\[1\] must be at least 1"),
        ({"merged_buffers": ((10,),)}, "must have the 11 elements of the units, got 10"),
        ({"unit_buffers": ((5, 6),)}, r"must have the elements of their units, got \(11,\)"),
    ],
)
def test_an_invalid_model_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelProfile(unit_numels=(5, 6), **fields)


def test_does_not_fit_names_the_rank_and_the_bytes():
    cluster = changed(a_cluster(), 1, memory_bytes=100 * MIB)
    assert memory_needed(cluster, a_plan(0))[1] > 100 * MIB
    needs = r"stage 0: rank 1 \(slow\) needs at least 120.2 MiB for 2 samples"
    with pytest.raises(DoesNotFit, match=needs) as error:
        predict(cluster, a_plan(0))
    assert "may use 100.0 MiB of 100.0 MiB" in str(error.value)
    reserved = dataclasses.replace(a_cluster(), memory_reserve=0.9)
    with pytest.raises(DoesNotFit, match=r"may use 100.0 MiB of 1000.0 MiB"):
        predict(reserved, a_plan(0))


def test_a_batch_larger_than_measured_raises():
    plan = Plan.manual("9,1", stage=0)
    for ask in (predict, memory_needed):
        with pytest.raises(DoesNotFit, match=r"rank 0 \(fast\): a micro-batch of 9 samples"):
            ask(a_cluster(), plan)
    assert issubclass(DoesNotFit, ValueError)


def test_plans_for_other_ranks_or_with_unit_settings_raise():
    with pytest.raises(ValueError, match="the plan is for 1 ranks, but the profile has 2"):
        predict(a_cluster(), Plan.manual("4", stage=0))
    same = UnitPlan("layers.0", shares=(0.5, 0.5))
    assert predict(a_cluster(), a_plan(2, units=(same,))) == predict(a_cluster(), a_plan(2))


@given(seed=st.integers(0, 2**32), stage=st.sampled_from(STAGES))
def test_communication_is_at_most_the_step(seed, stage):
    draw = random.Random(seed)
    cluster = planning_oracle.random_cluster(draw, draw.choice((1, 2, 3)), stage)
    roomy = tuple(dataclasses.replace(d, memory_bytes=10**12) for d in cluster.devices)
    cluster = dataclasses.replace(cluster, devices=roomy)
    for plan in (
        Plan.even(cluster.world_size, 6, 1, stage),
        Plan.manual([1] * cluster.world_size, stage=stage, passes=2),
    ):
        prediction = predict(cluster, plan)
        assert 0.0 <= prediction.communication_seconds <= prediction.step_seconds
        exposed = prediction.communication_seconds + max(prediction.compute_seconds)
        if not StageCosts(cluster, stage).synchronizes_every_pass:
            assert exposed <= prediction.step_seconds * (1 + 1e-9)


def test_a_negative_residual_shortens_the_reported_communication():
    network = dataclasses.replace(a_cluster().network, step_seconds=(0.0, -1.0, 0.0, 0.0))
    prediction = predict(a_cluster(network=network), a_plan(1))
    assert prediction.step_seconds == pytest.approx(0.6 + 0.06)
    assert prediction.communication_seconds == pytest.approx(0.06)


# The prediction as a value


def test_a_prediction_is_json_and_has_an_optimality_gap_if_its_plan_was_searched():
    prediction = predict(a_cluster(), a_plan(1))
    content = json.loads(json.dumps(prediction.to_dict()))
    assert prediction.optimality_gap is content["optimality_gap"] is None
    assert content["step_seconds"] == prediction.step_seconds
    assert content["memory_bytes"] == list(prediction.memory_bytes)
    assert set(content) == {field.name for field in dataclasses.fields(prediction)}
    said = str(describe(a_cluster(), a_plan(1), "even"))
    assert "from the fastest plan" not in said


def test_bound_is_a_sentence():
    def bound(cluster, plan):
        return predict(cluster, plan).bound

    slower = a_plan(2, micro_batches=((1, 1), (3, 4)))
    assert bound(a_cluster(), slower).startswith("rank 1's compute (9")
    network = dataclasses.replace(a_cluster().network, reduce_scatter_seconds=10.0)
    slow_network = a_cluster(network=network)
    assert bound(slow_network, a_plan(1)).startswith("communication (94 % of the step)")
    assert bound(slow_network, a_plan(2)).startswith("communication (9")
    tight = changed(slow_network, 1, memory_bytes=memory_needed(slow_network, a_plan(2))[1])
    assert bound(tight, a_plan(2)).startswith("rank 1's memory: it holds no more than 2 samples")
