"""Calibration recovers the residuals of the cost model from observed steps.

A `true` cluster with residuals predicts steps. `fit` and `refine` get the same cluster without
residuals and these steps, and must recover the residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import cluster as measured_cluster

from poplar import ClusterProfile, Plan, simulate
from poplar.planner.calibration import (
    LARGEST_SLOWDOWN,
    at_profiled_speed,
    change_of_speeds,
    fit,
    noise_of_speeds,
    plans_to_observe,
    refine,
)
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import predict
from poplar.planner.what_if import with_slower_devices
from poplar.values.observation import Observation

STAGES = (0, 1, 2, 3)
EACH_PASS = (2, 3)
"""Stages with a synchronization per pass."""
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
    """The observation of a plan on the true cluster."""
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
def test_residuals_are_recovered_and_predict_other_plans(stage):
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
def test_temporary_slowdown_of_a_device_is_not_engine_overhead(stage):
    slowness = (1.3, 0.9, 1.0, 1.1)
    now = with_slower_devices(plain(), slowness)
    turns = [
        [replace(observed(at, plan), slowdowns=factors) for plan in two_plans(stage)]
        for at, factors in ((now, slowness), (plain(), (1.0,) * 4))
    ]
    found = fit(plain(), turns, asynchronous=False)
    assert_predicts(found, [observed(plain(), plan) for plan in two_plans(stage)])
    for device in found.devices:
        assert device.pass_overhead_seconds == pytest.approx((0.0,) * 4, abs=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_a_program_that_ends_during_steps_leaves_no_residual(stage):
    """Its passes show the speed; the mean of the plain passes before and after does not."""
    profiled = with_slower_devices(plain(), (1.0, 2.0, 1.0, 1.0))
    few, many = two_plans(stage)
    seen = [
        replace(observed(profiled, few), slowdowns=(1.0,) * 4),
        replace(
            observed(plain(), many),
            slowdowns=(1.0, 0.75, 1.0, 1.0),
            slowdown_changes=(0.0, -0.5, 0.0, 0.0),
        ),
    ]
    found = fitted(profiled, seen)
    residuals = found.network.synchronization_seconds[stage], found.network.step_seconds[stage]
    assert residuals == pytest.approx((0.0, 0.0), abs=1e-9)
    steady = fitted(profiled, [seen[0], replace(seen[1], slowdown_changes=())])
    assert steady.network.step_seconds[stage] != pytest.approx(0.0, abs=1e-4)


def test_curves_are_at_the_usual_speed_and_know_how_much_it_changes():
    """The curve of rank 1 was measured while another program ran."""
    slowdowns = [(1.0, 0.5, 1.0, 1.2), (1.0, 0.5, 1.0, 0.8), (1.0, 0.5, 1.0, 1.0)]
    at = [(with_slower_devices(plain(), own), own) for own in slowdowns]
    turns = [[replace(observed(now, p), slowdowns=own) for p in two_plans(0)] for now, own in at]
    found = fit(plain(), turns, asynchronous=False)
    for factor, device, known in zip(
        (1.0, 0.5, 1.0, 1.0), found.devices, plain().devices, strict=True
    ):
        assert device.seconds(4) == pytest.approx(factor * known.seconds(4))
    steady, _, _, changing = (device.noise for device in found.devices)
    assert steady < 0.02 < 0.1 < changing


def test_a_program_that_runs_at_one_of_many_moments_makes_the_curve_uncertain():
    slowdowns = [(1.0,) * 4] * 6 + [(1.0, 1.6, 1.0, 1.0)]
    at = [(with_slower_devices(plain(), own), own) for own in slowdowns]
    turns = [[replace(observed(now, p), slowdowns=own) for p in two_plans(0)] for now, own in at]
    steady, disturbed, *_ = fit(plain(), turns, asynchronous=False).devices
    assert disturbed.seconds(4) == pytest.approx(plain().devices[1].seconds(4))
    assert steady.noise < 0.02 < 0.1 < disturbed.noise


def test_speeds_that_change_make_the_step_of_any_plan_noisy():
    slow = with_slower_devices(plain(), (1.2,) * 4)
    ran, other = two_plans(0)
    steady = [observed(plain(), ran)] * 2
    assert noise_of_speeds(plain(), other, steady) == noise_of_speeds(plain(), other, []) == 0.0
    assert 0.05 < noise_of_speeds(plain(), other, [*steady, observed(slow, ran)]) < 0.15


def test_plans_that_a_curve_predicts_differently_do_not_make_a_step_noisy():
    slow = with_slower_devices(plain(), (1.2,) * 4)
    one, other = two_plans(0)
    seen = [observed(plain(), one), observed(slow, other)] * 2
    assert noise_of_speeds(plain(), one, seen) == pytest.approx(0.0)


def test_change_of_speeds_is_that_of_the_ranks_a_step_waits_for():
    plan, *_ = two_plans(0)
    compute = predict(plain(), plan).compute_seconds
    factors = tuple(1.2 if seconds == max(compute) else 1.0 for seconds in compute)
    assert change_of_speeds(plain(), plan, [observed(plain(), plan)]) == pytest.approx(0.0)
    for change in (factors, (1 / 1.2,) * 4):
        slow = with_slower_devices(plain(), change)
        step, other = (predict(each, plan).step_seconds for each in (plain(), slow))
        found = change_of_speeds(plain(), plan, [observed(slow, plan)])
        assert found == pytest.approx(abs(other / step - 1.0))


@pytest.mark.parametrize("stage", STAGES)
def test_plans_that_leave_ranks_out_show_speeds_only(stage):
    """Their collectives are not those of all ranks."""
    slow = with_slower_devices(plain(), (1.2,) * 4)
    plan = Plan.manual(SIZES[1:], stage=stage).beside((0,))
    seen = observed(slow, plan)
    found = refine(plain(), [seen], asynchronous=False)
    assert found.network == plain().network
    factors = [
        a.seconds(8) / b.seconds(8) for a, b in zip(found.devices, plain().devices, strict=True)
    ]
    assert factors == pytest.approx([1.0, 1.2, 1.2, 1.2])
    change = seen.step_seconds / predict(plain(), plan).step_seconds - 1.0
    assert change_of_speeds(plain(), plan, [seen]) == pytest.approx(change)
    assert noise_of_speeds(plain(), plan, [seen] * 2) == pytest.approx(0.0)
    assert noise_of_speeds(plain(), plan, [seen, observed(plain(), plan)]) > 0.05


@pytest.mark.parametrize("stage", EACH_PASS)
@pytest.mark.parametrize("synchronization", [0.006, -0.0016])
def test_number_of_passes_separates_synchronization_from_step_residual(stage, synchronization):
    true = with_residuals(plain(), stage, synchronization=synchronization, step=0.013)
    found = fitted(plain(), [observed(true, plan) for plan in two_plans(stage)]).network
    expected = at_stage(stage, synchronization), at_stage(stage, 0.013)
    assert found.synchronization_seconds == pytest.approx(expected[0], abs=1e-12)
    assert found.step_seconds == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_pass_overhead_is_shared_between_stages(slow):
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


@pytest.mark.parametrize("stage", STAGES)
def test_single_plan_gives_no_synchronization_residual(stage):
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
def test_two_observations_are_fitted_exactly_with_a_synchronization_per_pass(
    stage, beyond, once, overlap
):
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
def test_observations_are_fitted_on_average_with_one_synchronization_per_step(stage):
    seen = [
        observed(plain(), plan, predict(plain(), plan).step_seconds + beyond)
        for plan, beyond in zip(two_plans(stage), (0.02, 0.08), strict=True)
    ]
    found = fitted(plain(), seen)
    errors = [o.step_seconds - predict(found, o.plan).step_seconds for o in seen]
    assert errors == pytest.approx([-0.03, 0.03])
    assert found.network.synchronization_seconds == (0.0,) * 4


@given(st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4), st.sampled_from(STAGES))
def test_faster_passes_give_zero_overhead_not_negative(factors, stage):
    seen = []
    for plan in two_plans(stage):
        observation = observed(plain(), plan)
        passes = tuple(
            tuple(seconds * factor for seconds in own)
            for own, factor in zip(observation.pass_seconds, factors, strict=True)
        )
        seen.append(replace(observation, pass_seconds=passes))
    for factor, device in zip(factors, fitted(plain(), seen).devices, strict=True):
        assert min(device.pass_overhead_seconds) >= 0.0
        assert (device.pass_overhead_seconds[stage] > 0.0) == (factor > 1.0)


def test_one_disturbed_pass_does_not_change_the_overhead():
    seen = [observed(plain(), plan) for plan in two_plans(2)]
    disturbed = ((*seen[1].pass_seconds[0][:2], 9.0), *seen[1].pass_seconds[1:])
    seen[1] = replace(seen[1], pass_seconds=disturbed)
    assert fitted(plain(), seen).devices[0].pass_overhead_seconds[2] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_observed_stage_changes(stage):
    before = with_residuals(
        plain(), (stage + 1) % 4, passes=(0.01,) * 4, synchronization=0.02, step=0.03
    )
    true = with_residuals(plain(), stage, passes=(0.005,) * 4, synchronization=0.001, step=0.002)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(before, seen)
    for other in set(STAGES) - {stage}:
        plan = Plan.manual(SIZES, stage=other, passes=2)
        assert predict(found, plan) == predict(before, plan)
    assert found.model == before.model
    assert [d.points for d in found.devices] == [d.points for d in before.devices]
    refined = refine(before, seen[:1], asynchronous=False)
    for other in set(STAGES) - {stage}:
        for was, now in zip(before.devices, refined.devices, strict=True):
            assert now.pass_overhead_seconds[other] == was.pass_overhead_seconds[other]
            assert now.step_overhead_seconds[other] == was.step_overhead_seconds[other]
        for name in ("synchronization_seconds", "step_seconds"):
            assert getattr(refined.network, name)[other] == getattr(before.network, name)[other]


def test_the_stages_that_ran_are_known_and_an_older_profile_stays_one_of_all_stages():
    seen = [observed(plain(), plan) for stage in (1, 3) for plan in two_plans(stage)]
    found = fitted(plain(), seen)
    assert found.observed_stages == (1, 3)
    one = [observed(plain(), two_plans(0)[0])]
    assert refine(found, one, asynchronous=False).observed_stages == (0, 1, 3)
    assert refine(plain(), one, asynchronous=False).observed_stages == ()


def test_rank_without_samples_keeps_its_curve_and_its_pass_overhead():
    before = with_residuals(plain(), 2, passes=(0.01, 0.02, 0.03, 0.04))
    seen = [observed(before, plan) for plan in two_plans(2, (16, 5, 6, 0))]
    for found in (fitted(before, seen), refine(before, seen[1:2], asynchronous=False)):
        assert found.devices[3].pass_overhead_seconds[2] == 0.04
        assert found.devices[3].points == plain().devices[3].points


@pytest.mark.parametrize("stage", STAGES)
def test_pass_times_of_asynchronous_devices_are_ignored(stage):
    true = with_residuals(plain(), stage, synchronization=0.004, step=0.01)
    seen = [
        replace(observed(true, plan), pass_seconds=((1e-6,) * plan.passes(0),) * 4)
        for plan in two_plans(stage)
    ]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.devices == plain().devices
    assert_predicts(found, seen)
    refined = refine(plain(), seen[1:2], asynchronous=True)
    assert refined.devices == plain().devices
    assert_predicts(refined, seen[1:])


@pytest.mark.parametrize("stage", EACH_PASS)
@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.6, 1.0])
def test_overlap_is_recovered(stage, overlap):
    true = plain(overlap=overlap)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.overlap == pytest.approx(overlap, abs=1e-9)
    assert_predicts(found, seen)
    synchronous = fitted(plain(), seen, asynchronous=False)
    assert synchronous.overlap == 0.0
    assert_predicts(synchronous, seen)


@pytest.mark.parametrize("stage", EACH_PASS)
def test_overlap_is_at_most_one(stage):
    """What full overlap does not explain is a residual, limited by the compute time."""
    true = with_residuals(plain(overlap=1.0), stage, synchronization=-0.001)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(plain(), seen, asynchronous=True)
    assert found.overlap == pytest.approx(1.0, abs=EXACT)
    assert -0.001 <= found.network.synchronization_seconds[stage] <= 1e-12
    assert_predicts(found, seen)


def communicating(slower: float = 1.0, **changes: Any) -> ClusterProfile:
    """A slow network, and units that are reduced one by one at every stage."""
    network = replace(
        plain().network, reduce_scatter_seconds=0.16 * slower, all_gather_seconds=0.14 * slower
    )
    model = replace(plain().model, unit_numels=(12_000_000,) * 6)
    return plain(network=network, model=model, **changes)


OTHER_PLANS = [
    lambda stage: Plan.manual((20, 7, 7, 6), stage=stage),
    lambda stage: Plan.manual((9, 9, 2, 1), stage=stage, passes=2),
    lambda stage: Plan.manual((2, 1, 1, 1), stage=stage, passes=4),
    lambda stage: Plan.manual((16, 5, 6, 4), stage=stage, shares=(0.4, 0.3, 0.2, 0.1)),
]


def calibration_plans(stages: Sequence[int] = STAGES) -> list[Plan]:
    every = (plans_to_observe(communicating(), s, overlapped_seconds=math.inf) for s in stages)
    return [plan for plans in every for plan in plans]


def predicted_seconds(cluster: ClusterProfile, plan: Plan) -> float:
    return predict(cluster, plan).step_seconds


def simulated_seconds(cluster: ClusterProfile, plan: Plan) -> float:
    return simulate(cluster, plan).step_seconds


def largest_error(
    found: ClusterProfile, true: ClusterProfile, seconds: Callable[[ClusterProfile, Plan], float]
) -> float:
    """The largest relative error over plans of all stages that were not observed."""
    plans = [of_stage(stage) for stage in STAGES for of_stage in OTHER_PLANS]
    return max(abs(predict(found, p).step_seconds / seconds(true, p) - 1.0) for p in plans)


@pytest.mark.parametrize("overlap", [0.0, 0.35, 0.7, 1.0])
@pytest.mark.parametrize("slowness", [(1.0,) * 4, (1.2, 0.9, 1.0, 1.1)])
def test_hidden_communication_is_subtracted_once_at_every_stage(overlap, slowness):
    residuals = (0.01, 0.02, 0.013, 0.004)
    network = replace(communicating().network, step_seconds=residuals)
    true = communicating(overlap=overlap)
    true = replace(true, network=network)
    now = with_slower_devices(true, slowness)
    slowdowns = () if set(slowness) == {1.0} else slowness
    seen = [replace(observed(now, plan), slowdowns=slowdowns) for plan in calibration_plans()]
    found = fitted(communicating(), seen, asynchronous=True)
    assert found.overlap == pytest.approx(overlap, abs=0.02)
    assert found.network.step_seconds == pytest.approx(residuals, abs=0.005)
    assert largest_error(found, now, predicted_seconds) < 0.01  # the usual speed


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_simulated_steps_are_predicted_after_calibration(overlap):
    """The simulator runs unit by unit, so it does not overlap exactly as the closed form says."""
    true = communicating(overlap=overlap)
    plans = calibration_plans()
    seen = [observed(true, plan, simulate(true, plan).step_seconds) for plan in plans]
    found = fitted(communicating(), seen, asynchronous=True)
    assert largest_error(found, true, simulated_seconds) < 0.03


@pytest.mark.parametrize("stages", [(0,), (1,), (0, 1), (2,), (3,), (0, 3)])
def test_overlap_is_recovered_from_any_stages(stages):
    true = communicating(overlap=0.6)
    seen = [observed(true, plan) for plan in calibration_plans(stages)]
    found = fitted(communicating(), seen, asynchronous=True)
    assert found.overlap == pytest.approx(0.6, abs=0.01)
    assert largest_error(found, true, predicted_seconds) < 0.01


@pytest.mark.parametrize(("stage", "slower"), [(0, 1.5), (1, 2.0), (2, 4.0), (3, 2.0)])
def test_calibration_passes_are_long_enough_to_show_overlap(stage, slower):
    """Passes of two samples hide less than overlap allows, which looks like a smaller overlap."""
    slow, true = communicating(slower), communicating(slower, overlap=0.9)
    short = plans_to_observe(slow, stage)
    long = plans_to_observe(slow, stage, overlapped_seconds=math.inf)
    assert long[0].micro_batches[0][0] > short[0].micro_batches[0][0]
    found = [
        fitted(slow, [observed(true, plan) for plan in plans], asynchronous=True)
        for plans in (short, long)
    ]
    assert found[0].overlap < 0.8
    assert found[1].overlap == pytest.approx(0.9, abs=0.01)
    assert plans_to_observe(slow, stage, overlapped_seconds=1e-3) == short


def test_overlap_is_zero_with_a_single_unit():
    """At stage 3 the collective of a single unit starts when its pass is over."""
    stage = 3
    cluster = plain(model=replace(plain().model, unit_numels=(1_000_000,)))
    true = with_residuals(cluster, stage, synchronization=-0.002)
    seen = [observed(true, plan) for plan in two_plans(stage)]
    found = fitted(cluster, seen, asynchronous=True)
    assert found.overlap == 0.0
    assert_predicts(found, seen)


residuals = st.floats(-0.05, 0.2)


@given(
    stage=st.sampled_from(STAGES),
    overheads=st.tuples(*[st.floats(0.0, 0.1)] * 4),
    synchronization=residuals,
    step=residuals,
    known_synchronization=residuals,
    known_step=residuals,
)
def test_refined_profile_predicts_its_plan_exactly(
    stage, overheads, synchronization, step, known_synchronization, known_step
):
    true = with_residuals(
        plain(), stage, passes=overheads, synchronization=synchronization, step=step
    )
    before = with_residuals(plain(), stage, synchronization=known_synchronization, step=known_step)
    seen = observed(true, Plan.manual(SIZES, stage=stage, passes=2))
    known = 2 * (
        max(0.0, known_synchronization) - min(0.0, synchronization)
    )  # no step is shorter than this
    seen = replace(seen, step_seconds=seen.step_seconds + known)
    assert_predicts(refine(before, [seen], asynchronous=False), [seen])


def test_refine_accepts_a_plan_that_is_predicted_not_to_fit():
    """A point that is measured later may show that the plan needs too much memory."""
    tight = tuple(replace(device, memory_bytes=1000) for device in plain().devices)
    seen = observed(plain(), Plan.manual(SIZES, stage=0), 3.0)
    refined = refine(replace(plain(), devices=tight), [seen], asynchronous=False)
    assert_predicts(replace(refined, devices=plain().devices), [seen])


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.sampled_from(STAGES))
def test_observed_speed_scales_the_whole_curve(factors, stage):
    before = with_residuals(plain(), stage, passes=(0.004, 0.0, 0.002, 0.0))
    seen = observed(before, two_plans(stage)[1])
    passes = tuple(
        tuple(factor * seconds for seconds in own)
        for factor, own in zip(factors, seen.pass_seconds, strict=True)
    )
    found = refine(before, [replace(seen, pass_seconds=passes)], asynchronous=False)
    costs = StageCosts(found, stage)
    for rank, (device, was) in enumerate(zip(found.devices, before.devices, strict=True)):
        size = SIZES[rank]
        assert costs.pass_seconds(rank, size) == pytest.approx(passes[rank][0])
        for batch in (1, 3, 17):
            changed = device.seconds(batch) / was.seconds(batch)
            assert changed == pytest.approx(device.seconds(size) / was.seconds(size))


@pytest.mark.parametrize("stage", STAGES)
def test_observed_speed_pools_all_stages(stage):
    first = observed(plain(), Plan.manual((16, 2, 3, 5), stage=stage))
    second = observed(plain(), Plan.manual((4, 4, 4, 4), stage=0))
    slower = replace(second, pass_seconds=tuple((2 * own[0],) for own in second.pass_seconds))
    found = refine(plain(), [first, slower], asynchronous=False)
    for rank, (before, device) in enumerate(zip(plain().devices, found.devices, strict=True)):
        took = first.pass_seconds[rank][0] + slower.pass_seconds[rank][0]
        known = first.pass_seconds[rank][0] + second.pass_seconds[rank][0]
        assert device.seconds(8) == pytest.approx(took / known * before.seconds(8))


@pytest.mark.parametrize("stage", STAGES)
def test_refined_profile_predicts_plans_of_a_stage_on_average(stage):
    true = with_residuals(plain(), stage, passes=(0.01, 0.0, 0.02, 0.005), step=0.03)
    seen = [
        observed(true, Plan.manual((4, 4, 4, 4), stage=stage)),
        observed(true, Plan.manual((16, 2, 3, 5), stage=stage), 2.5),
    ]
    found = refine(plain(), seen, asynchronous=False)
    predicted = [predict(found, observation.plan).step_seconds for observation in seen]
    assert sum(predicted) == pytest.approx(sum(o.step_seconds for o in seen), rel=EXACT)


noisy_seconds = st.one_of(
    st.floats(0.0, 1e-3), st.floats(0.0, 10.0), st.floats(0.0, 1e6), st.just(0.0)
)
noisy_slowdowns = st.floats(-10.0, 1e3)


@st.composite
def noisy_observations(draw: st.DrawFn, stage: int, with_slowdowns: bool) -> list[Observation]:
    """Any times that a clock can give, for plans with idle ranks too."""
    sizes = draw(st.sampled_from([SIZES, (16, 5, 6, 0), (1, 0, 0, 0)]))
    found = []
    for plan in two_plans(stage, sizes):
        passes = tuple(
            tuple(draw(noisy_seconds) for size in own if size) for own in plan.micro_batches
        )
        found.append(
            Observation(
                plan=plan,
                step_seconds=draw(st.floats(1e-6, 1e4)),
                pass_seconds=passes,
                other_seconds=tuple(draw(st.floats(-1.0, 10.0)) for _ in range(4)),
                slowdowns=tuple(draw(noisy_slowdowns) for _ in range(4)) if with_slowdowns else (),
            )
        )
    return found


@given(st.data(), st.booleans(), st.booleans())
def test_any_noise_gives_a_valid_profile(data, asynchronous, with_slowdowns):
    turns = [
        [seen for stage in STAGES for seen in data.draw(noisy_observations(stage, with_slowdowns))]
    ]
    fitted_profile = fit(plain(), turns, asynchronous=asynchronous)
    refined = refine(fitted_profile, turns[0], asynchronous=asynchronous)
    for profile in (fitted_profile, refined):
        for seen in turns[0]:
            seconds = predict(profile, seen.plan).step_seconds
            assert 0.0 <= seconds < math.inf


def test_implausible_slowdown_is_limited():
    (plan, _) = two_plans(1)
    slowdowns = (1.0, -0.5, 1.0, 1.0)
    seen = at_profiled_speed(plain(), replace(observed(plain(), plan), slowdowns=slowdowns))
    expected = LARGEST_SLOWDOWN * observed(plain(), plan).pass_seconds[1][0]
    assert seen.pass_seconds[1][0] == pytest.approx(expected)


@pytest.mark.parametrize("stage", STAGES)
def test_calibration_plans_have_passes_of_equal_length(stage):
    cluster = plain()
    one, three = plans_to_observe(cluster, stage)
    assert [one.passes(0), three.passes(0)] == [1, 3]
    seconds = [d.seconds(own[0]) for d, own in zip(cluster.devices, one.micro_batches, strict=True)]
    assert max(seconds) < 2 * min(seconds)
    assert one.shares == pytest.approx((0.25,) * 4)


@pytest.mark.parametrize("stage", STAGES)
def test_calibration_plans_fit_in_memory(stage):
    """Passes after the first one need more memory than the first."""
    first, *others = plain().devices
    observed_passes = set()
    for part in (1, 2, 10, 100):
        tight = replace(first, memory_bytes=first.memory_bytes * part // 400)
        cluster = replace(plain(), devices=(tight, *others))
        with suppress(NoPlanFits):
            plans = plans_to_observe(cluster, stage)
            for plan in plans:
                predict(cluster, plan)
            observed_passes.add(tuple(max(map(len, plan.micro_batches)) for plan in plans))
    assert (1, 3) in observed_passes
