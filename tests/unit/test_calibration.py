"""What steps that ran teach the cost model: the arithmetic, on clusters that are only numbers.

A `true` cluster with residuals predicts steps; `fit` and `refine` see the same cluster without
residuals and those steps, and must find out what was left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import cluster as measured_cluster

from poplar import ClusterProfile, Plan
from poplar.observation import Observation, Slowdown
from poplar.planner.calibration import (
    at_observed_speeds,
    at_profiled_speed,
    fit,
    refine,
)
from poplar.planner.cost_model import StageCosts
from poplar.planner.prediction import predict
from poplar.planner.what_if import with_slower_devices

STAGES = (0, 1, 2, 3)
EACH_PASS = (2, 3)
"""Stages where ranks meet at every pass."""
SIZES = (16, 5, 6, 4)
EXACT = 1e-9


def plain(**changes: Any) -> ClusterProfile:
    """Four unequal ranks without residuals."""
    return replace(measured_cluster((33.0, 11.6, 11.2, 10.6), ["cpu"] * 4), **changes)


def with_residuals(
    cluster: ClusterProfile,
    stage: int,
    *,
    passes: tuple[float, ...] = (0.0,) * 4,
    steps: tuple[float, ...] = (0.0,) * 4,
    synchronization: float = 0.0,
    step: float = 0.0,
) -> ClusterProfile:
    devices = tuple(
        replace(
            device,
            pass_overhead_seconds=at_stage(stage, per_pass),
            step_overhead_seconds=at_stage(stage, per_step),
        )
        for device, per_pass, per_step in zip(cluster.devices, passes, steps, strict=True)
    )
    network = replace(
        cluster.network,
        synchronization_seconds=at_stage(stage, synchronization),
        step_seconds=at_stage(stage, step),
    )
    return replace(cluster, devices=devices, network=network)


def at_stage(stage: int, value: float) -> tuple[float, ...]:
    return tuple(value if other == stage else 0.0 for other in STAGES)


def observed(true: ClusterProfile, plan: Plan, step_seconds: float | None = None) -> Observation:
    """The plan as it would run on the true cluster."""
    costs = StageCosts(true, plan.stage)
    return Observation(
        plan=plan,
        step_seconds=step_seconds or predict(true, plan).step_seconds,
        pass_seconds=tuple(
            tuple(costs.pass_seconds(rank, size) for size in sizes if size)
            for rank, sizes in enumerate(plan.micro_batches)
        ),
        other_seconds=tuple(device.step_overhead_seconds[plan.stage] for device in true.devices),
    )


def two_plans(stage: int, sizes: tuple[int, ...] = SIZES) -> list[Plan]:
    return [Plan.manual(sizes, stage=stage, passes=passes) for passes in (1, 3)]


def fitted(
    cluster: ClusterProfile, observations: list[Observation], *, asynchronous: bool = False
) -> ClusterProfile:
    return fit(cluster, [observations], asynchronous=asynchronous)


def assert_predicts(cluster: ClusterProfile, observations: list[Observation]) -> None:
    for observation in observations:
        predicted = predict(cluster, observation.plan).step_seconds
        assert predicted == pytest.approx(observation.step_seconds, rel=EXACT)


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_engine_adds_is_found_out_and_predicts_other_plans_too(stage):
    true = with_residuals(
        plain(),
        stage,
        passes=(0.004, 0.011, 0.0, 0.007),
        steps=(0.002, 0.001, 0.003, 0.002),
        synchronization=0.006,
        step=0.013,
    )
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(plain(), seen)
    assert_predicts(found, seen)
    for rank, device in enumerate(found.devices):
        wanted = true.devices[rank]
        assert device.pass_overhead_seconds == pytest.approx(wanted.pass_overhead_seconds)
        assert device.step_overhead_seconds == pytest.approx(wanted.step_overhead_seconds)
    others = [
        Plan.manual((9, 9, 2, 1), stage=stage, passes=2),
        Plan.manual((20, 0, 7, 7), stage=stage, passes=5),
    ]
    assert_predicts(found, [observed(true, plan) for plan in others])


@pytest.mark.parametrize("stage", STAGES)
def test_devices_that_were_slower_beside_the_steps_are_not_charged_to_the_engine(stage):
    slowness = (1.3, 0.9, 1.0, 1.1)
    now = with_slower_devices(plain(), slowness)
    slowdowns = tuple(Slowdown(factor, 0.0) for factor in slowness)
    seen = [replace(observed(now, plan), slowdowns=slowdowns) for plan in two_plans(stage)]
    found = fitted(plain(), seen)
    assert_predicts(found, [observed(plain(), plan) for plan in two_plans(stage)])
    for device in found.devices:
        assert device.pass_overhead_seconds == pytest.approx((0.0,) * 4, abs=1e-12)


def test_what_is_not_sure_of_the_plain_passes_is_not_sure_of_the_steps():
    (plan, _), exact = two_plans(2), (Slowdown(1.0, 0.0),) * 3
    seen = replace(observed(plain(), plan), slowdowns=(*exact, Slowdown(1.0, 0.02)))
    unsure = at_profiled_speed(plain(), seen)
    assert unsure.spread_seconds == pytest.approx(0.02 * seen.step_seconds)
    passes = seen.pass_seconds[3][0]
    assert unsure.pass_errors == pytest.approx((0.0, 0.0, 0.0, 0.02 * passes))


@pytest.mark.parametrize("stage", EACH_PASS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_meeting_is_charged_with_what_is_beyond_noise(stage, sign):
    true = with_residuals(plain(), stage, synchronization=sign * 0.0016)
    one, three = (
        replace(observed(true, plan), spread_seconds=error)
        for plan, error in zip(two_plans(stage), (0.0006, 0.0008), strict=True)
    )
    found = fitted(plain(), [one, three])
    charged = found.network.synchronization_seconds[stage]
    assert charged == pytest.approx(sign * (0.0016 - 0.0005)), (
        "0.6, 0.8 and 1 ms, over two meetings"
    )
    missed = [predict(found, seen.plan).step_seconds - seen.step_seconds for seen in (one, three)]
    assert sum(missed) == pytest.approx(0.0, abs=1e-12), "and the step with the rest"


def test_a_pass_is_charged_with_what_is_beyond_noise():
    true = with_residuals(plain(), 1, passes=(0.004, 0.001, 0.002, 0.0))
    seen = [replace(observed(true, plan), pass_errors=(0.002,) * 4) for plan in two_plans(1)]
    charged = [device.pass_overhead_seconds[1] for device in fitted(plain(), seen).devices]
    noise = 0.002 / math.sqrt(2)
    expected = [max(0.0, extra - noise) for extra in (0.004, 0.001, 0.002, 0.0)]
    assert charged == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_passes_that_are_the_same_at_two_stages_tell_of_neither_what_only_one_of_them_took(slow):
    overheads, steps = (0.004, 0.11, 0.0, 0.07), {0: 0.013, 1: 0.021, 2: 0.002}
    true = {
        stage: with_residuals(plain(), stage, passes=overheads, step=steps[stage])
        for stage in steps
    }
    now = with_slower_devices(true[slow], (1.2, 1.0, 1.1, 1.0))
    seen = [
        observed(now if stage == slow else true[stage], plan)
        for stage in steps
        for plan in two_plans(stage)
    ]
    found = fitted(plain(), seen)
    for device, overhead in zip(found.devices, overheads, strict=True):
        assert device.pass_overhead_seconds == pytest.approx((overhead,) * 3 + (0.0,))
    for stage in steps:
        for plan in two_plans(stage):
            wanted = predict(true[stage], plan).step_seconds
            assert predict(found, plan).step_seconds == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize("stage", EACH_PASS)
def test_a_meeting_is_told_from_a_step_by_the_number_of_passes(stage):
    true = with_residuals(plain(), stage, synchronization=0.006, step=0.013)
    found = fitted(plain(), [observed(true, plan) for plan in two_plans(stage)]).network
    assert found.synchronization_seconds == pytest.approx(at_stage(stage, 0.006), abs=1e-12)
    assert found.step_seconds == pytest.approx(at_stage(stage, 0.013), abs=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_one_plan_alone_says_nothing_of_meetings(stage):
    true = with_residuals(plain(), stage, synchronization=0.006, step=0.013)
    seen = [observed(true, two_plans(stage)[1])]
    found = fitted(plain(), seen)
    assert_predicts(found, seen)
    assert found.network.synchronization_seconds == (0.0,) * 4


@given(
    stage=st.sampled_from(EACH_PASS),
    beyond=st.floats(0.0, 0.2),
    once=st.floats(0.0, 0.5),
    overlap=st.booleans(),
)
def test_two_observations_are_met_exactly_where_ranks_meet_at_every_pass(
    stage, beyond, once, overlap
):
    """Whatever a meeting and a step take beyond the closed form."""
    plans = two_plans(stage)
    seen = [
        observed(
            plain(),
            plan,
            predict(plain(), plan).step_seconds + once + beyond * plan.passes(0),
        )
        for plan in plans
    ]
    assert_predicts(fitted(plain(), seen, asynchronous=overlap), seen)


@pytest.mark.parametrize("stage", [0, 1])
def test_where_ranks_meet_once_a_step_the_observations_are_met_on_average(stage):
    seen = [
        observed(plain(), plan, predict(plain(), plan).step_seconds + beyond)
        for plan, beyond in zip(two_plans(stage), (0.02, 0.08), strict=True)
    ]
    found = fitted(plain(), seen)
    errors = [o.step_seconds - predict(found, o.plan).step_seconds for o in seen]
    assert errors == pytest.approx([-0.03, 0.03])
    assert found.network.synchronization_seconds == (0.0,) * 4


@given(st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4), st.sampled_from(STAGES))
def test_passes_faster_than_measured_are_a_quieter_machine_not_a_negative_overhead(factors, stage):
    seen = []
    for plan in two_plans(stage):
        observation = observed(plain(), plan)
        passes = tuple(
            tuple(seconds * factor for seconds in own)
            for own, factor in zip(observation.pass_seconds, factors, strict=True)
        )
        seen.append(replace(observation, pass_seconds=passes))
    for found in (
        fitted(plain(), seen),
        refine(plain(), stage, seen[:1], asynchronous=False),
    ):
        for factor, device in zip(factors, found.devices, strict=True):
            assert min(device.pass_overhead_seconds) >= 0.0
            assert (device.pass_overhead_seconds[stage] > 0.0) == (factor > 1.0)


def test_one_disturbed_pass_does_not_become_everybodys_overhead():
    seen = [observed(plain(), plan) for plan in two_plans(2)]
    disturbed = ((*seen[1].pass_seconds[0][:2], 9.0), *seen[1].pass_seconds[1:])
    seen[1] = replace(seen[1], pass_seconds=disturbed)
    assert fitted(plain(), seen).devices[0].pass_overhead_seconds[2] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_stage_that_ran_is_touched(stage):
    before = with_residuals(
        plain(), (stage + 1) % 4, passes=(0.01,) * 4, synchronization=0.02, step=0.03
    )
    true = with_residuals(plain(), stage, passes=(0.005,) * 4, synchronization=0.001, step=0.002)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    for found in (fitted(before, seen), refine(before, stage, seen[:1], asynchronous=False)):
        for other in set(STAGES) - {stage}:
            plan = Plan.manual(SIZES, stage=other, passes=2)
            assert predict(found, plan) == predict(before, plan)
        assert found.model == before.model
        assert [d.points for d in found.devices] == [d.points for d in before.devices]


def test_a_rank_without_samples_keeps_its_overhead_of_a_pass():
    before = with_residuals(plain(), 2, passes=(0.01, 0.02, 0.03, 0.04))
    seen = [observed(before, plan) for plan in two_plans(2, (16, 5, 6, 0))]
    for found in (fitted(before, seen), refine(before, 2, seen[1:2], asynchronous=False)):
        assert found.devices[3].pass_overhead_seconds[2] == 0.04


@pytest.mark.parametrize("stage", STAGES)
def test_spans_of_an_asynchronous_device_say_nothing_but_its_steps_do(stage):
    true = with_residuals(plain(), stage, synchronization=0.004, step=0.01)
    seen = [
        replace(observed(true, plan), pass_seconds=((1e-6,) * plan.passes(0),) * 4)
        for plan in two_plans(stage)
    ]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.devices == plain().devices
    assert_predicts(found, seen)
    refined = refine(plain(), stage, seen[1:2], asynchronous=True)
    assert refined.devices == plain().devices
    assert_predicts(refined, seen[1:])


@pytest.mark.parametrize("stage", EACH_PASS)
@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.6, 1.0])
def test_collectives_under_compute_are_found_out_as_overlap(stage, overlap):
    true = plain(overlap=overlap)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.overlap == pytest.approx(overlap, abs=1e-9)
    assert_predicts(found, seen)
    persistent = fitted(plain(), seen, asynchronous=False)
    assert persistent.overlap == 0.0
    assert_predicts(persistent, seen)


@pytest.mark.parametrize("stage", EACH_PASS)
def test_no_more_overlaps_than_everything(stage):
    """Meetings that cost less than full overlap explains: the rest is a residual.

    As far as it shows: no meeting costs less than its compute.
    """
    true = with_residuals(plain(overlap=1.0), stage, synchronization=-0.001)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.overlap == 1.0
    assert -0.001 <= found.network.synchronization_seconds[stage] <= 1e-12
    assert_predicts(found, seen)


def test_where_nothing_can_overlap_nothing_is_said_to():
    """One unit at stage 3: its collective begins when its pass is over, and so does the next."""
    stage = 3
    cluster = plain(model=replace(plain().model, unit_numels=(1_000_000,)))
    true = with_residuals(cluster, stage, synchronization=-0.002)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(cluster, seen, asynchronous=True)
    assert found.overlap == 0.0
    assert_predicts(found, seen)


@given(
    stage=st.sampled_from(EACH_PASS),
    factor=st.floats(0.3, 3.0),
    later=st.floats(0.3, 3.0),
)
def test_overlap_is_a_fraction_whatever_was_observed(stage, factor, later):
    seen = [
        observed(plain(), plan, predict(plain(), plan).step_seconds * off)
        for plan, off in zip(two_plans(stage), (factor, later), strict=True)
    ]
    assert 0.0 <= fitted(plain(), seen, asynchronous=True).overlap <= 1.0


residuals = st.floats(-0.05, 0.2)


@given(
    stage=st.sampled_from(STAGES),
    overheads=st.tuples(*[st.floats(0.0, 0.1)] * 4),
    synchronization=residuals,
    step=residuals,
    known_synchronization=residuals,
    known_step=residuals,
)
def test_a_refined_profile_predicts_its_plan_as_it_ran(
    stage, overheads, synchronization, step, known_synchronization, known_step
):
    """Whatever was known before, and whatever is wrong with it."""
    true = with_residuals(
        plain(), stage, passes=overheads, synchronization=synchronization, step=step
    )
    before = with_residuals(plain(), stage, synchronization=known_synchronization, step=known_step)
    seen = observed(true, Plan.manual(SIZES, stage=stage, passes=2))
    known = 2 * (
        max(0.0, known_synchronization) - min(0.0, synchronization)
    )  # no step is shorter than this
    seen = replace(seen, step_seconds=seen.step_seconds + known)
    assert_predicts(refine(before, stage, [seen], asynchronous=False), [seen])


@pytest.mark.parametrize("stage", STAGES)
def test_the_last_trial_of_a_stage_is_the_one_that_is_predicted_exactly(stage):
    true = with_residuals(plain(), stage, passes=(0.01, 0.0, 0.02, 0.005), step=0.03)
    first = observed(true, Plan.manual((4, 4, 4, 4), stage=stage))
    last = observed(true, Plan.manual((16, 2, 3, 5), stage=stage), 2.5)
    found = refine(plain(), stage, [first], asynchronous=False)
    assert_predicts(found, [first])
    assert_predicts(refine(found, stage, [last], asynchronous=False), [last])


def test_a_plan_that_ran_is_learnt_from_even_if_it_should_not_fit():
    """A point measured after it ran may show that it needs more memory than a plan may use."""
    tight = tuple(replace(device, memory_bytes=1000) for device in plain().devices)
    seen = observed(plain(), Plan.manual(SIZES, stage=0), 3.0)
    refined = refine(replace(plain(), devices=tight), 0, [seen], asynchronous=False)
    assert_predicts(replace(refined, devices=plain().devices), [seen])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.sampled_from(STAGES))
def test_a_rank_that_was_faster_or_slower_in_training_is_so_at_every_batch(factors, stage):
    before = with_residuals(plain(), stage, passes=(0.004, 0.0, 0.002, 0.0))
    seen = observed(before, two_plans(stage)[1])
    passes = tuple(
        tuple(factor * seconds for seconds in own)
        for factor, own in zip(factors, seen.pass_seconds, strict=True)
    )
    found = at_observed_speeds(before, [replace(seen, pass_seconds=passes)])
    costs = StageCosts(before, stage), StageCosts(found, stage)
    for rank, factor in enumerate(factors):
        for batch in (1, 3, 17):
            was, now = (cost.pass_seconds(rank, batch) for cost in costs)
            assert now == pytest.approx(factor * was)


@pytest.mark.parametrize("stage", STAGES)
def test_speeds_are_those_of_all_that_ran_whichever_stage_it_ran_at(stage):
    first = observed(plain(), Plan.manual((16, 2, 3, 5), stage=stage))
    second = observed(plain(), Plan.manual((4, 4, 4, 4), stage=0))
    slower = replace(second, pass_seconds=tuple((2 * own[0],) for own in second.pass_seconds))
    found = at_observed_speeds(plain(), [first, slower])
    for rank, (before, device) in enumerate(zip(plain().devices, found.devices, strict=True)):
        took = first.pass_seconds[rank][0] + slower.pass_seconds[rank][0]
        known = first.pass_seconds[rank][0] + second.pass_seconds[rank][0]
        assert device.seconds(8) == pytest.approx(took / known * before.seconds(8))


@pytest.mark.parametrize("stage", STAGES)
def test_plans_of_a_stage_are_predicted_right_on_average(stage):
    true = with_residuals(plain(), stage, passes=(0.01, 0.0, 0.02, 0.005), step=0.03)
    seen = [
        observed(true, Plan.manual((4, 4, 4, 4), stage=stage)),
        observed(true, Plan.manual((16, 2, 3, 5), stage=stage), 2.5),
    ]
    found = refine(plain(), stage, seen, asynchronous=False)
    predicted = [predict(found, observation.plan).step_seconds for observation in seen]
    assert sum(predicted) == pytest.approx(sum(o.step_seconds for o in seen), rel=EXACT)


def test_a_rank_that_had_no_samples_keeps_its_curve():
    seen = observed(plain(), Plan.manual((9, 0, 4, 2), stage=0))
    found = at_observed_speeds(plain(), [seen])
    assert found.devices[1] == plain().devices[1]
