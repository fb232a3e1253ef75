"""Plans whose units have their own shares: seconds, memory and simulation."""

from __future__ import annotations

import dataclasses
import random

import pytest
from test_simulator import FULL, a_cluster, a_device, a_plan, any_case, spans_of, with_fractions

from poplar import Plan, predict, simulate
from poplar.planner.prediction import memory_needed
from poplar.values.plan import UnitPlan
from poplar.values.profile import ClusterProfile

SHARDED = (1, 2, 3)


def a_named_cluster(*units: int, **changes) -> ClusterProfile:
    cluster = a_cluster(units=units, **{"overlap": 0.0, **changes})
    names = tuple(f"unit {number}" for number in range(len(units)))
    return dataclasses.replace(cluster, model=dataclasses.replace(cluster.model, unit_names=names))


def with_units(plan: Plan, **shares: tuple[float, ...]) -> Plan:
    """The plan in which `unit_0=(1.0, 0.0)` gives unit 0 to rank 0."""
    units = (UnitPlan(name.replace("_", " "), shares=own) for name, own in shares.items())
    return dataclasses.replace(plan, units=tuple(units))


@pytest.mark.parametrize("stage", SHARDED)
def test_shares_equal_to_the_plans_change_nothing(stage):
    for seed in range(20):
        cluster, plan = any_case(4 * seed + stage)
        names = tuple(f"unit {number}" for number in range(len(cluster.model.unit_numels)))
        model = dataclasses.replace(cluster.model, unit_names=names)
        cluster = dataclasses.replace(cluster, model=model)
        units = tuple(UnitPlan(name, shares=plan.shares) for name in names)
        same = dataclasses.replace(plan, units=units)
        assert predict(cluster, same) == predict(cluster, plan)
        assert simulate(cluster, same) == simulate(cluster, plan)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        # Even shares take 0.12 s and 0.04 s for the whole model, one owner twice as long.
        (1, 0.4 + 0.75 * 0.12 + 0.25 * 0.24 + 0.75 * 0.04 + 0.25 * 0.08 + 0.625 * 0.08),
        (2, 0.4 + 0.75 * 0.12 + 0.25 * 0.24 + 0.75 * 0.04 + 0.25 * 0.08 + 0.625 * 0.08),
        # The last unit is still unsharded when the backward begins.
        (3, 0.4 + 0.75 * 0.12 + 0.25 * 0.24 + 0.75 * 0.04 + 2 * 0.25 * 0.08 + 0.625 * 0.08),
    ],
)
def test_collectives_and_the_optimizer_follow_the_shares_of_each_unit(stage, seconds):
    cluster = a_named_cluster(FULL, 3 * FULL)
    plan = with_units(a_plan(stage, (4,), (4,)), unit_0=(1.0, 0.0))
    simulated = simulate(cluster, plan)
    assert simulated.step_seconds == pytest.approx(seconds)
    # At stage 3 the closed form counts a second all-gather of unit 0 at the average rate.
    rel = 0.05 if stage == 3 else 1e-9
    assert predict(cluster, plan).step_seconds == pytest.approx(seconds, rel=rel)
    assert predict(cluster, plan).optimizer_seconds == pytest.approx((0.05, 0.03))


def test_each_unit_takes_the_seconds_of_its_own_shares():
    cluster = a_named_cluster(FULL, 3 * FULL)
    plan = with_units(a_plan(1, (4,), (4,)), unit_0=(1.0, 0.0))
    reduced = {
        what: end - begin
        for what, begin, end in spans_of(simulate(cluster, plan))
        if "reduce" in what
    }
    assert reduced == {"reduce 0": pytest.approx(0.06), "reduce 1": pytest.approx(0.03)}


@pytest.mark.parametrize("stage", SHARDED)
def test_units_with_their_own_shares_are_not_merged(stage):
    """As in the engine, so that each of them can have its own owners."""
    cluster = a_named_cluster(*(FULL // 8,) * 4)
    plan = with_units(a_plan(stage, (4,), (4,)), unit_2=(0.0, 1.0))
    reduced = [span.unit for span in simulate(cluster, plan).spans[0] if span.what == "reduce"]
    assert reduced == [3, 2, 1, 0]


def test_a_rank_waits_only_for_the_units_that_it_owns():
    cluster = a_named_cluster(FULL, FULL, gather=0.0, overlap=1.0)
    plan = with_units(a_plan(1, (4,), (2,)), unit_0=(0.0, 1.0), unit_1=(1.0, 0.0))
    begins = {what: begin for what, begin, _ in spans_of(simulate(cluster, plan), rank=1)}
    assert begins["reduce 1"] == 0.15, "rank 0 owns it"
    assert begins["reduce 0"] == 0.4, "rank 1 needs the gradients of rank 0"


@pytest.mark.parametrize("stage", SHARDED)
def test_memory_follows_what_a_rank_owns_of_all_units(stage):
    cluster = a_named_cluster(FULL, 3 * FULL)
    own = with_units(a_plan(stage, (4,), (4,)), unit_0=(1.0, 0.0), unit_1=(0.25, 0.75))
    plain = a_plan(stage, (4,), (4,), shares=(0.4375, 0.5625))
    needed, expected = memory_needed(cluster, own), memory_needed(cluster, plain)
    received = 2 * 4 * 3 * FULL  # of the larger unit, from both ranks
    assert all(own >= plain for own, plain in zip(needed, expected, strict=True))
    assert all(own <= plain + received for own, plain in zip(needed, expected, strict=True))


def test_closed_form_follows_the_simulation_of_small_units_with_one_owner():
    for seed in range(40):
        draw = random.Random(seed)
        stage, ranks = draw.choice(SHARDED), draw.choice((2, 3))
        numels = [draw.choice((FULL, FULL, FULL // 8)) for _ in range(12)]
        devices = [a_device(sample=draw.choice((0.1, 0.2))) for _ in range(ranks)]
        cluster = a_named_cluster(
            *numels,
            overlap=draw.choice((0.0, 0.5, 1.0)),
            gather=draw.random(),
            reduce=draw.random(),
        )
        rates = (1e-9,) * ranks
        network = dataclasses.replace(
            cluster.network, send_seconds_per_byte=rates, receive_seconds_per_byte=rates
        )
        cluster = dataclasses.replace(cluster, devices=tuple(devices), network=network)
        if seed % 2:
            forward = [draw.uniform(0.5, 1.5) for _ in numels]
            cluster = with_fractions(cluster, forward, [2 * own for own in forward])
        plan = a_plan(stage, *((draw.randint(1, 8),) for _ in range(ranks)))
        owner = {
            f"unit_{unit}": tuple(float(rank == unit % ranks) for rank in range(ranks))
            for unit, numel in enumerate(numels)
            if numel < FULL
        }
        plan = with_units(plan, **owner)
        simulated = simulate(cluster, plan).step_seconds
        assert predict(cluster, plan).step_seconds == pytest.approx(simulated, rel=0.06), seed


def test_own_shares_of_an_unknown_unit_raise():
    cluster = a_cluster()
    plan = with_units(a_plan(2, (4,), (4,)), unit_0=(1.0, 0.0))
    with pytest.raises(ValueError, match="no unit names: profile again"):
        predict(cluster, plan)
