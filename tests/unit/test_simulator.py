"""`simulate` runs a step unit by unit, as the engine does, and agrees with the closed form.

The hand-computed cases use two units of equal size, a backward of half a pass, and 0.1 s per
sample: a pass of 4 samples is two forwards of 0.1 s, then two backwards of 0.1 s.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_oracle import STAGES
from subset import choose

from poplar import Plan, predict, simulate
from poplar.planner.cost_model import StageCosts
from poplar.simulator.timeline import Timeline
from poplar.step.actions import RANK_ACTIONS
from poplar.values.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, UnitPlan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile

FULL = 2**23
"""Elements of a full buffer: such a unit is communicated alone at every stage."""


def a_device(name="device", *, sample=0.1) -> DeviceProfile:
    return device(
        name=name,
        memory=2**50,
        latency=0.0,
        sample=sample,
        batches=(1, 16),
        sample_bytes=0,
        optimizer_seconds=0.08,
    )


def a_cluster(*devices, units=(FULL, FULL), reduce=0.12, gather=0.04, **changes) -> ClusterProfile:
    return cluster_of(
        *(devices or (a_device(), a_device())),
        units=units,
        communication=reduce,
        gather=gather,
        **{"overlap": 1.0, "backward_fraction": 0.5, **changes},
    )


def a_plan(stage, *micro_batches, shares=None) -> Plan:
    even = (1 / len(micro_batches),) * len(micro_batches)
    return Plan(
        stage=stage,
        global_batch=sum(map(sum, micro_batches)),
        micro_batches=micro_batches,
        shares=shares or even,
    )


def spans_of(timeline: Timeline, rank=0) -> list[tuple]:
    """The spans of a rank as `(name, begin, end)`, by begin, compute before communication."""
    return [
        (
            span.what if span.unit is None else f"{span.what} {span.unit}",
            round(span.begin, 9),
            round(span.end, 9),
        )
        for span in sorted(timeline.spans[rank], key=_place)
    ]


def _place(span):
    return round(span.begin, 9), span.stream == "communication"


# By hand


def test_stage_0_gathers_each_unit_after_the_next_reduction():
    timeline = simulate(a_cluster(), a_plan(0, (4,), (4,)))
    assert spans_of(timeline) == [
        ("forward 0", 0.0, 0.1),
        ("forward 1", 0.1, 0.2),
        ("backward 1", 0.2, 0.3),
        ("backward 0", 0.3, 0.4),
        ("reduce 1", 0.3, 0.36),
        ("reduce 0", 0.4, 0.46),
        ("all_gather_gradients 1", 0.46, 0.48),
        ("all_gather_gradients 0", 0.48, 0.5),
        ("optimizer", 0.5, 0.58),
    ]
    assert timeline.step_seconds == pytest.approx(0.58)


def test_stage_1_all_gathers_parameters_after_the_optimizer():
    timeline = simulate(a_cluster(), a_plan(1, (2, 4), (2, 4)))
    assert spans_of(timeline)[4:] == [
        ("forward 0", 0.2, 0.3),
        ("forward 1", 0.3, 0.4),
        ("backward 1", 0.4, 0.5),
        ("backward 0", 0.5, 0.6),
        ("reduce 1", 0.5, 0.56),
        ("reduce 0", 0.6, 0.66),
        ("optimizer", 0.66, 0.7),
        ("all_gather_parameters 0", 0.7, 0.72),
        ("all_gather_parameters 1", 0.72, 0.74),
    ]
    assert {span.pass_index for span in timeline.spans[0] if span.what == "reduce"} == {1}


def test_stage_2_overlaps_the_last_reduction_with_the_next_forward():
    timeline = simulate(a_cluster(), a_plan(2, (4, 4), (4, 4)))
    assert spans_of(timeline)[3:12] == [
        ("backward 0", 0.3, 0.4),
        ("reduce 1", 0.3, 0.36),
        ("forward 0", 0.4, 0.5),
        ("reduce 0", 0.4, 0.46),
        ("forward 1", 0.5, 0.6),
        ("backward 1", 0.6, 0.7),
        ("backward 0", 0.7, 0.8),
        ("reduce 1", 0.7, 0.76),
        ("reduce 0", 0.8, 0.86),
    ]
    assert timeline.step_seconds == pytest.approx(0.86 + 0.04 + 0.04)


def test_stage_3_gathers_each_unit_during_the_previous_one():
    timeline = simulate(a_cluster(), a_plan(3, (4,), (4,)))
    assert spans_of(timeline) == [
        ("unshard 0", 0.0, 0.02),
        ("forward 0", 0.02, 0.12),
        ("unshard 1", 0.02, 0.04),
        ("forward 1", 0.12, 0.22),
        ("unshard 0", 0.12, 0.14),
        ("backward 1", 0.22, 0.32),
        ("backward 0", 0.32, 0.42),
        ("reduce 1", 0.32, 0.38),
        ("reduce 0", 0.42, 0.48),
        ("optimizer", 0.48, 0.52),
    ]


def test_stage_3_reduces_resident_units_last():
    cluster = a_cluster(units=(FULL,) * 4, gather=0.08, reduce=0.0)
    model = dataclasses.replace(cluster.model, resident_units=(0, 2))
    for micro_batches in (((4,), (4,)), ((4,), (0,))):
        timeline = simulate(
            dataclasses.replace(cluster, model=model, overlap=0.0), a_plan(3, *micro_batches)
        )
        carried = [span for span in timeline.spans[0] if span.stream == "communication"]
        assert [span.unit for span in carried] == [0, 1, 2, 3, 1]
        assert timeline.step_seconds == pytest.approx(0.4 + 5 * 0.02 + 0.04)
    reducing = a_cluster(units=(FULL,) * 4, gather=0.0, reduce=0.04, model=model)
    for rank, micro_batch in enumerate((4, 0)):
        timeline = simulate(reducing, a_plan(3, (4,), (micro_batch,)))
        carried = [span for span in timeline.spans[rank] if span.stream == "communication"]
        assert [span.unit for span in carried] == [3, 1, 0, 2]


def test_stage_3_gathers_persistent_units_once_per_step():
    cluster = a_cluster(units=(FULL,) * 4, gather=0.08, reduce=0.0, overlap=0.0)
    model = dataclasses.replace(cluster.model, unit_names=("a", "b", "c", "d"))
    cluster = dataclasses.replace(cluster, model=model)
    persistent = tuple(UnitPlan(name, persistent=True) for name in "bd")
    for last in (4, 0):
        plan = dataclasses.replace(a_plan(3, (4, 4), (4, last)), units=persistent)
        timeline = simulate(cluster, plan)
        carried = [span for span in timeline.spans[1] if span.stream == "communication"]
        assert [span.unit for span in carried] == [0, 1, 2, 3, 2, 0, 0, 2, 2, 0]
        assert timeline.step_seconds == pytest.approx(0.8 + 10 * 0.02 + 0.04)
        assert predict(cluster, plan).step_seconds == pytest.approx(timeline.step_seconds)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        (0, 0.6 + 0.12 + 0.04 + 0.08),
        (1, 0.6 + 0.12 + 0.04 + 0.04),
        (2, 0.6 + 2 * 0.12 + 0.04 + 0.04),
        # The last unit is still there when the backward begins: one and a half gathers.
        (3, 0.6 + 2 * (0.12 + 0.06) + 0.04),
    ],
)
def test_without_overlap_communication_stops_compute(stage, seconds):
    cluster = a_cluster(overlap=0.0)
    timeline = simulate(cluster, a_plan(stage, (2, 4), (2, 4)))
    assert timeline.step_seconds == pytest.approx(seconds)
    assert timeline.busy_seconds == pytest.approx((0.68 if stage == 0 else 0.64,) * 2)


def test_an_overlap_of_one_half_runs_compute_at_half_speed():
    timeline = simulate(a_cluster(overlap=0.5), a_plan(1, (4,), (4,)))
    assert spans_of(timeline)[3:6] == [
        ("backward 0", 0.3, 0.43),
        ("reduce 1", 0.3, 0.36),
        ("reduce 0", 0.43, 0.49),
    ]
    assert timeline.busy_seconds == pytest.approx((0.44, 0.44))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_last_rank_starts_a_collective_and_the_others_wait(stage):
    timeline = simulate(a_cluster(), a_plan(stage, (2,), (4,)))
    assert ("reduce 1", 0.3, 0.36) in spans_of(timeline, 0)
    # From 0.2 to 0.3 for the first reduction, from 0.36 to 0.4 for the second.
    assert timeline.waiting_seconds == pytest.approx((0.14, 0.0))


def test_units_take_their_fraction_of_passes_and_collectives():
    timeline = simulate(a_cluster(units=(3 * FULL // 2, FULL // 2)), a_plan(1, (4,), (4,)))
    assert spans_of(timeline)[:5] == [
        ("forward 0", 0.0, 0.15),
        ("forward 1", 0.15, 0.2),
        ("backward 1", 0.2, 0.25),
        ("backward 0", 0.25, 0.4),
        ("reduce 1", 0.25, 0.28),
    ]
    assert spans_of(timeline)[6][2] == pytest.approx(0.4 + 0.09)


def with_fractions(cluster, forward, backward) -> ClusterProfile:
    """With the seconds of the units measured."""
    total = sum(forward) + sum(backward)
    model = dataclasses.replace(
        cluster.model,
        unit_forward_fraction=tuple(own / total for own in forward),
        unit_backward_fraction=tuple(own / total for own in backward),
    )
    return dataclasses.replace(cluster, model=model)


def test_measured_units_take_their_own_time():
    """The head has few elements and most of the forward; the first unit most of the backward."""
    cluster = with_fractions(a_cluster(units=(3 * FULL // 2, FULL // 2)), (1, 3), (3, 1))
    timeline = simulate(cluster, a_plan(1, (4,), (4,)))
    assert spans_of(timeline)[:5] == [
        ("forward 0", 0.0, 0.05),
        ("forward 1", 0.05, 0.2),
        ("backward 1", 0.2, 0.25),
        ("backward 0", 0.25, 0.4),
        ("reduce 1", 0.25, 0.28),
    ]


def test_a_merged_unit_takes_the_time_of_its_units():
    units = (FULL, FULL // 4, FULL // 4)
    cluster = with_fractions(a_cluster(units=units), (2, 1, 1), (1, 2, 5))
    for stage in (0, 1, 2):
        timeline = simulate(cluster, a_plan(stage, (4,), (4,)))
        assert spans_of(timeline)[1:3] == [("forward 1", 0.1, 0.2), ("backward 1", 0.2, 0.375)]


@pytest.mark.parametrize(("stage", "reductions"), [(0, 2), (1, 2), (2, 2), (3, 5)])
def test_small_units_share_a_buffer_before_stage_3(stage, reductions):
    cluster = a_cluster(units=(FULL, FULL // 4, FULL // 4, FULL // 4, FULL // 4))
    timeline = simulate(cluster, a_plan(stage, (4,), (4,)))
    assert sum(span.what == "reduce" for span in timeline.spans[0]) == reductions


@pytest.mark.parametrize("stage", STAGES)
def test_a_large_unit_is_reduced_in_several_buffers(stage):
    timeline = simulate(a_cluster(units=(FULL, 3 * FULL)), a_plan(stage, (4,), (4,)))
    reduced = [span for span in timeline.spans[0] if span.what == "reduce"]
    assert [span.unit for span in reduced] == [1, 1, 1, 0]
    assert [span.seconds for span in reduced] == pytest.approx([0.03] * 4)


def test_shares_change_the_cost_of_collectives():
    timeline = simulate(a_cluster(overlap=0.0), a_plan(1, (4,), (4,), shares=(0.75, 0.25)))
    assert timeline.step_seconds == pytest.approx(0.4 + 1.5 * 0.12 + 0.06 + 1.5 * 0.04)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_without_a_share_does_not_wait_for_gradients(stage):
    timeline = simulate(a_cluster(gather=0.0), a_plan(stage, (4,), (2,), shares=(1.0, 0.0)))
    assert [begin for what, begin, _ in spans_of(timeline, 1) if what == "reduce 1"] == [0.15]
    assert [begin for what, begin, _ in spans_of(timeline, 0) if what == "reduce 1"] == [0.3]
    assert timeline.busy_seconds == pytest.approx((0.48, 0.2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_samples_takes_part_in_every_collective(stage):
    timeline = simulate(a_cluster(), a_plan(stage, (4,), (0,)))
    carried = [
        [what for what, *_ in spans_of(timeline, rank) if not what.startswith(("for", "back"))]
        for rank in range(2)
    ]
    assert carried[0] == carried[1]
    assert timeline.step_seconds == simulate(a_cluster(), a_plan(stage, (4,), (4,))).step_seconds
    assert timeline.waiting_seconds[1] > 0.0


# Residuals


def with_residuals(cluster, *, of_pass=0.0, of_rank=0.0, of_synchronization=0.0, of_step=0.0):
    devices = tuple(
        dataclasses.replace(
            device, pass_overhead_seconds=(of_pass,) * 4, step_overhead_seconds=(of_rank,) * 4
        )
        for device in cluster.devices
    )
    network = dataclasses.replace(
        cluster.network,
        synchronization_seconds=(of_synchronization,) * 4,
        step_seconds=(of_step,) * 4,
    )
    return dataclasses.replace(cluster, devices=devices, network=network)


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("stage", STAGES)
def test_residuals_are_added_to_passes_synchronizations_and_the_step(stage, overlap):
    plan, cluster = a_plan(stage, (2, 4), (2, 4)), a_cluster(overlap=overlap)
    plain = simulate(cluster, plan).step_seconds
    synchronizations = 2 if stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS else 1
    found = simulate(
        with_residuals(cluster, of_rank=0.02, of_synchronization=0.004, of_step=5e-4), plan
    )
    assert found.step_seconds == pytest.approx(plain + 0.02 + 0.004 * synchronizations + 5e-4)
    longer = simulate(with_residuals(cluster, of_pass=0.01), plan)
    assert sum(longer.busy_seconds) == pytest.approx(
        sum(simulate(cluster, plan).busy_seconds) + 4 * 0.01
    )


@pytest.mark.parametrize("stage", STAGES)
def test_negative_residuals_shrink_communication_and_then_the_optimizer(stage):
    plan, cluster = a_plan(stage, (2, 4), (2, 4)), a_cluster(overlap=0.0)
    once = a_plan(stage, (4,), (4,))
    less = simulate(
        with_residuals(cluster, of_synchronization=-0.01, of_step=-0.05), once
    ).step_seconds
    expected = simulate(cluster, once).step_seconds - 0.01
    expected -= min(0.05, 0.04 if stage == 3 else 0.05)
    assert less == pytest.approx(expected)
    nothing = with_residuals(cluster, of_synchronization=-9.0, of_step=-9.0)
    assert simulate(nothing, plan).step_seconds == pytest.approx(0.6)
    nothing = with_residuals(cluster, of_pass=-9.0, of_synchronization=-9.0, of_step=-9.0)
    assert simulate(nothing, plan).step_seconds == 0.0


# What the closed form leaves out


def test_stage_2_ranks_start_the_next_pass_early():
    cluster = a_cluster(reduce=0.0, gather=0.0)
    plan = a_plan(2, (1, 4), (4, 1))
    assert simulate(cluster, plan).step_seconds == pytest.approx(0.5 + 0.04)
    assert predict(cluster, plan).step_seconds == pytest.approx(0.8 + 0.04)


def test_stage_3_ranks_cannot_start_the_next_pass_early():
    cluster = a_cluster(reduce=0.0, gather=0.0)
    plan = a_plan(3, (1, 4), (4, 1))
    assert simulate(cluster, plan).step_seconds == pytest.approx(0.8 + 0.04)


# Comparison with the closed form

BLOCKS = (2 * FULL,)


def a_random_model(draw: random.Random) -> ModelProfile:
    """Equal units, few or many; or blocks and a resident embedding."""
    if draw.random() < 0.5:
        return ModelProfile(unit_numels=(FULL,) * draw.choice((12, 32)))
    embedding = draw.choice((1, 3, 6)) * FULL
    return ModelProfile(
        unit_numels=(embedding, *BLOCKS * draw.choice((8, 16, 22))), resident_units=(0,)
    )


def a_random_measured_model(draw: random.Random) -> ModelProfile:
    """As above, or a convolutional model, whose parameters are in the last units; with compute that
    varies from unit to unit, or is mostly in the first or the last ones.
    """
    parts = (1 / 8, 1 / 4, 1 / 4, 1 / 2, 1, 1, 12, 2, 1 / 2)
    model = ModelProfile(unit_numels=tuple(int(FULL * part) for part in parts))
    if draw.random() < 0.5:
        model = a_random_model(draw)
    units = range(len(model.unit_numels))
    kind = draw.choice(("noisy", "skewed", "first", "last"))
    forward = [
        {
            "noisy": draw.uniform(0.5, 1.5),
            "skewed": 0.01 + draw.random() ** 2,
            "first": (len(units) - unit) ** 2,
            "last": (1 + unit) ** 2,
        }[kind]
        for unit in units
    ]
    backward = [own * draw.uniform(1.5, 2.5) for own in forward]
    total = sum(forward) + sum(backward)
    return dataclasses.replace(
        model,
        unit_forward_fraction=tuple(own / total for own in forward),
        unit_backward_fraction=tuple(own / total for own in backward),
    )


def a_random_case(
    seed: int, random_model: Callable[[random.Random], ModelProfile] = a_random_model
) -> tuple[ClusterProfile, Plan]:
    """A random cluster and model, and a plan of one of the policies.

    Negative synchronization residuals stand for overlap, so they are used only without overlap.
    """
    draw = random.Random(seed)
    stage = seed % 4
    ranks = draw.choice((1, 2, 2, 3, 4, 6))
    cluster = planning_oracle.random_cluster(draw, ranks, stage)
    network = cluster.network
    if cluster.overlap:
        synchronization_seconds = tuple(
            max(0.0, seconds) for seconds in network.synchronization_seconds
        )
        network = dataclasses.replace(network, synchronization_seconds=synchronization_seconds)
    cluster = dataclasses.replace(
        cluster,
        model=random_model(draw),
        network=network,
        devices=tuple(
            dataclasses.replace(d, memory_bytes=2**50, points=without_unit_bytes(d.points))
            for d in cluster.devices
        ),
    )
    policy = draw.choice(("exact", "exact", "even"))
    plan = search(cluster, global_batch=draw.randint(ranks, 64), stages=(stage,), policy=policy)
    return cluster, plan


def alternate(cluster: ClusterProfile, plan: Plan) -> bool:
    """Whether no rank is the last at every synchronization of a plan whose ranks may run ahead.

    At stage 3 ranks without a share may run ahead.
    """
    costs = StageCosts(cluster, plan.stage)
    columns = [
        [costs.pass_seconds(rank, batch) for rank, batch in enumerate(column)]
        for column in zip(
            *plan.micro_batches, strict=plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS
        )
    ]
    may_run_ahead = plan.stage == 2 or (plan.stage == 3 and 0.0 in plan.shares)
    return may_run_ahead and not any(
        all(column[rank] == max(column) for column in columns) for rank in range(plan.world_size)
    )


CLOSED_FORM_CASES = choose(quick=250, full=800)


def test_closed_form_is_within_three_percent_of_the_simulation():
    """If ranks are last in turn, the closed form is an upper estimate."""
    compared, turns = dict.fromkeys(STAGES, 0), 0
    for seed in range(CLOSED_FORM_CASES):
        cluster, plan = a_random_case(seed)
        simulated = simulate(cluster, plan).step_seconds
        predicted = predict(cluster, plan).step_seconds
        if alternate(cluster, plan):
            turns += 1
            assert predicted >= simulated * 0.93, f"seed {seed}"
        else:
            compared[plan.stage] += 1
            assert predicted == pytest.approx(simulated, rel=0.03, abs=1e-9), f"seed {seed}"
    assert sum(compared.values()) >= 0.87 * CLOSED_FORM_CASES, compared
    assert min(compared.values()) >= 0.15 * CLOSED_FORM_CASES, compared


def test_closed_form_follows_the_measured_time_of_units():
    errors = []
    for seed in range(choose(quick=120, full=600)):
        cluster, plan = a_random_case(seed, a_random_measured_model)
        if not alternate(cluster, plan):
            simulated = simulate(cluster, plan).step_seconds
            error = predict(cluster, plan).step_seconds / simulated - 1.0 if simulated else 0.0
            assert abs(error) <= 0.06, f"seed {seed}"
            errors.append(abs(error))
    errors.sort()
    assert errors[int(0.95 * len(errors))] <= 0.02


# Properties

seeds = st.integers(0, 2**32)
few = settings(max_examples=60, deadline=None)


def without_unit_bytes(points: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
    """For a model with other units."""
    empty = {"unit_bytes": (), "bytes_after_unit": ()}
    return tuple(dataclasses.replace(point, **empty) for point in points)


def any_case(seed: int) -> tuple[ClusterProfile, Plan]:
    """A random cluster with enough memory, and a random plan."""
    draw = random.Random(seed)
    stage, ranks = draw.choice(STAGES), draw.choice((1, 2, 3, 5))
    cluster = planning_oracle.random_cluster(draw, ranks, stage)
    devices = tuple(
        dataclasses.replace(
            device,
            memory_bytes=2**50,
            points=(*device.points, BatchPoint(batch=9, seconds=4.0, activation_bytes=10**7)),
        )
        for device in cluster.devices
    )
    cluster = dataclasses.replace(cluster, devices=devices)
    synchronizations = draw.randint(1, 3)
    micro_batches = [
        tuple(
            draw.randint(0, 9)
            for _ in range(
                synchronizations
                if stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS
                else draw.randint(0, 3)
            )
        )
        for _ in range(ranks)
    ]
    micro_batches[0] = (1,) * synchronizations
    parts = [draw.choice((0.0, 1.0, draw.random())) for _ in range(ranks)]
    parts[draw.randrange(ranks)] += 0.1
    return cluster, a_plan(stage, *micro_batches, shares=tuple(p / sum(parts) for p in parts))


@given(seed=seeds)
@few
def test_spans_of_a_stream_do_not_overlap_and_times_add_up(seed):
    cluster, plan = any_case(seed)
    timeline = simulate(cluster, plan)
    assert timeline == simulate(cluster, plan)
    carried = set()
    for rank, spans in enumerate(timeline.spans):
        for stream in ("compute", "communication"):
            own = [span for span in spans if span.stream == stream]
            for before, after in itertools.pairwise(own):
                assert before.end <= after.begin + 1e-9
        carried.add(
            tuple((span.what, span.unit) for span in spans if span.stream == "communication")
        )
        assert max((span.end for span in spans), default=0.0) <= timeline.step_seconds
        accounted = (
            timeline.busy_seconds[rank]
            + timeline.communication_seconds[rank]
            + timeline.waiting_seconds[rank]
        )
        assert accounted == pytest.approx(timeline.step_seconds)
        assert 0.0 <= timeline.busy_fraction[rank] <= 1.0 + 1e-9
    assert len(carried) == 1, "all ranks issue the same collectives in the same order"


@given(copies=st.integers(2, 5), seed=seeds)
@few
def test_equal_ranks_have_equal_spans(copies, seed):
    """Equal ranks are simulated once; the network costs the same."""
    draw = random.Random(seed)
    devices = [a_device(sample=draw.choice((0.1, 0.2))) for _ in range(2)]
    sizes, stage = [(draw.randint(1, 8),) for _ in range(2)], draw.choice(STAGES)
    few_ranks = simulate(a_cluster(*devices), a_plan(stage, *sizes, shares=(0.5, 0.5)))
    many = simulate(a_cluster(*devices * copies), a_plan(stage, *sizes * copies))
    assert many.spans == many.spans[:2] * copies
    gained = (1 - 1 / copies) * 0.04 if stage else 0.0  # of the optimizer
    assert many.step_seconds == pytest.approx(few_ranks.step_seconds - gained)


@pytest.mark.parametrize("stage", STAGES)
def test_a_thousand_ranks_with_a_hundred_units(stage):
    kinds = [a_device(f"kind {k}", sample=0.1 + 0.01 * k) for k in range(8)]
    cluster = a_cluster(*(kinds[r % 8] for r in range(1000)), units=(FULL,) * 100, overlap=0.8)
    timeline = simulate(cluster, a_plan(stage, *((4, 8) for _ in range(1000))))
    assert timeline.world_size == 1000
    assert timeline.busy_fraction[7] > timeline.busy_fraction[0]
    assert timeline.step_seconds >= 12 * 0.17
    assert len(str(timeline).splitlines()) == 2 + 1000


# Agreement with the engine


def test_stages_match_the_strategies_of_the_engine():
    from poplar.zero import setup

    assert [actions.limits_reductions for actions in RANK_ACTIONS] == [
        strategy.reduces_every_pass for strategy in setup.STRATEGY_CLASSES
    ]
    assert [actions.__name__ for actions in RANK_ACTIONS] == [
        strategy.__name__ for strategy in setup.STRATEGY_CLASSES
    ]


# Errors and output


def test_a_timeline_prints_as_a_table_marked_as_simulated():
    cluster = a_cluster(a_device("fast"), a_device("slow", sample=0.2))
    text = str(simulate(cluster, a_plan(1, (4,), (4,))))
    assert text.splitlines() == [
        "stage 1, 2 ranks: simulated 0.94 s a step",
        "rank  device  compute  communication  waiting  busy",
        "   0  fast     0.44 s         0.16 s   0.34 s  47 %",
        "   1  slow     0.84 s          0.1 s     0 ms  89 %",
    ]


def test_a_perfetto_trace_has_a_process_per_rank_and_a_thread_per_stream(tmp_path):
    timeline = simulate(a_cluster(), a_plan(3, (4,), (2,)))
    timeline.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert named == {
        (rank, thread): name
        for rank in range(2)
        for thread, name in enumerate(("compute", "communication"))
    }
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == sum(map(len, timeline.spans))
    assert {event["pid"] for event in drawn} == {0, 1}
    end = max(event["ts"] + event["dur"] for event in drawn)
    assert math.isclose(end, 1e6 * timeline.step_seconds)
    assert {"unit": 1, "pass": 0} in [event["args"] for event in drawn]
