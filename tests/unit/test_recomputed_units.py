"""The planner lets ranks recompute units where the memory that this frees makes a step faster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import planning_oracle
import pytest
from all_ranks import search
from clusters import cluster_of, device
from planning_oracle import STAGES, Oracle
from subset import choose
from test_search import seconds_of, some_shares

from poplar.planner import saved_memory
from poplar.planner.calibration import refine
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import fits, memory_needed, predict
from poplar.planner.recomputed_curves import saved_part
from poplar.simulator.step_simulation import simulate
from poplar.values.observation import Observation
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile

MB = 10**6
UNITS = 4
MODEL = ModelProfile(
    unit_numels=(250_000,) * (UNITS + 1),
    unit_names=("root", *(f"blocks.{block}" for block in range(UNITS))),
    resident_units=(0,),
)
STATE = MODEL.numel * (4 + 4 + 8)


def with_recomputation(plain: DeviceProfile, *, slower: float = 1.33, part: float = 0.1, times=4):
    """The device with passes that take longer, but `part` of the bytes, up to larger batches."""
    measured = [*((one, 1) for one in plain.points), (plain.points[-1], times)]
    points = {
        factor * point.batch: BatchPoint(
            batch=factor * point.batch,
            seconds=slower * factor * point.seconds,
            activation_bytes=round(part * factor * point.activation_bytes),
        )
        for point, factor in measured
    }
    return dataclasses.replace(plain, recomputed_points=tuple(points.values()))


def counts(plan: Plan) -> list[int]:
    return [len(plan.recomputed_units(rank)) for rank in range(plan.world_size)]


def unequal_memory(**changes) -> ClusterProfile:
    """Memory 8:1:1:1, equal speeds; a latency makes small passes slow."""
    large, small = (
        with_recomputation(
            device(memory=memory * 20 * MB, sample_bytes=4 * MB, latency=0.05, largest=8, speed=20)
        )
        for memory in (8, 1)
    )
    return cluster_of(large, small, small, small, **{"model": MODEL, **changes})


# When it helps


def test_small_devices_recompute_and_large_ones_do_not_need_to():
    cluster = unequal_memory(communication=0.05)
    plain = search(cluster, global_batch=64, recompute="never")
    plan = search(cluster, global_batch=64)
    assert counts(plain) == [0, 0, 0, 0]
    assert counts(plan)[0] < min(counts(plan)[1:])
    assert seconds_of(plain) >= 1.15 * seconds_of(plan)
    for rank, needed in enumerate(plan.prediction["memory_bytes"]):
        assert needed <= cluster.devices[rank].memory_bytes


def test_units_are_recomputed_in_the_order_of_their_forward_and_no_more_than_needed():
    cluster = unequal_memory(communication=0.2)
    plan = search(cluster, global_batch=64)
    for rank, count in enumerate(counts(plan)):
        assert plan.recomputed_units(rank) == MODEL.unit_names[1 : 1 + count]
        if count:
            fewer = without_unit(plan, MODEL.unit_names[count], rank)
            assert not fits(cluster, fewer)


def without_unit(plan: Plan, name: str, rank: int) -> Plan:
    units = (
        dataclasses.replace(unit, recomputed_on=tuple({*unit.recomputed_on} - {rank}))
        if unit.name == name
        else unit
        for unit in plan.units
    )
    return dataclasses.replace(plan, units=tuple(units))


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_recomputed_if_memory_does_not_bind(stage, monkeypatch):
    ample = with_recomputation(device(memory=4000 * MB, sample_bytes=MB), times=1)
    monkeypatch.setattr(saved_memory, "_with_fewest_units", None)  # no other search
    plan = search(cluster_of(ample, ample, model=MODEL), global_batch=16, stages=(stage,))
    assert counts(plan) == [0, 0]


def test_nothing_is_recomputed_if_smaller_passes_are_as_fast_per_sample():
    tight = with_recomputation(device(memory=STATE + 40 * MB, latency=0.0, sample_bytes=4 * MB))
    cluster = cluster_of(tight, tight, model=MODEL, communication=0.0)
    assert counts(search(cluster, global_batch=32, preference=0.0)) == [0, 0]


def test_a_gain_below_the_preference_is_left():
    cluster = unequal_memory(communication=0.2)
    plain = seconds_of(search(cluster, global_batch=64, recompute="never", preference=0.0))
    gain = plain / seconds_of(search(cluster, global_batch=64, preference=0.0)) - 1.0
    assert counts(search(cluster, global_batch=64, preference=gain + 0.01)) == [0] * 4
    assert any(counts(search(cluster, global_batch=64, preference=gain - 0.01)))


@pytest.mark.parametrize("policy", ["even", "paper"])
def test_other_policies_do_not_recompute(policy):
    tight = with_recomputation(device(memory=STATE + 40 * MB, latency=0.3, sample_bytes=4 * MB))
    cluster = cluster_of(tight, tight, model=MODEL)
    assert any(counts(search(cluster, global_batch=64)))
    assert not any(counts(search(cluster, global_batch=64, policy=policy)))


def test_a_plan_that_fits_only_with_recomputation_is_found():
    small = with_recomputation(device(memory=STATE // 2 + 15 * MB, sample_bytes=30 * MB))
    cluster = cluster_of(small, small, model=MODEL)
    with pytest.raises(NoPlanFits, match=r"would fit: recompute='auto' \(recomputation on rank"):
        search(cluster, global_batch=4, recompute="never")
    plan = search(cluster, global_batch=4)
    assert max(counts(plan)) > 0
    assert fits(cluster, plan)


def activations_shrink(plain: DeviceProfile) -> DeviceProfile:
    """The device with activations by unit: in the backward of each, those of units before it."""
    points = tuple(
        dataclasses.replace(
            point,
            unit_bytes=(0, *(point.activation_bytes * unit // UNITS for unit in range(1, 5))),
            bytes_after_unit=(0, *(point.activation_bytes * unit // UNITS for unit in range(4))),
        )
        for point in plain.points
    )
    return dataclasses.replace(plain, points=points)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_plan_that_fits_only_without_recomputation_is_found(stage):
    """Memory by unit is known without recomputation only, so its plans may need less beside
    gradients that accumulate.
    """
    known = with_recomputation(
        activations_shrink(device(memory=100 * MB, sample_bytes=4 * MB)), part=1.0
    )
    plain = dataclasses.replace(known, recomputed_points=())
    needed = needed_for_one_sample(plain, stage)
    assert needed < needed_for_one_sample(fully_recomputing(known), stage)
    tight = dataclasses.replace(known, memory_bytes=math.ceil(needed / 0.95) + 1)
    request = {"global_batch": 2, "stages": (stage,)}
    never = search(cluster_of(tight, tight, model=MODEL), **request, recompute="never")
    plan = search(cluster_of(tight, tight, model=MODEL), **request)
    assert plan == never
    assert counts(plan) == [0, 0]


def fully_recomputing(one: DeviceProfile) -> DeviceProfile:
    return dataclasses.replace(one, points=one.recomputed_points, recomputed_points=())


def needed_for_one_sample(one: DeviceProfile, stage: int) -> int:
    """The most of two equal ranks, each with passes of one sample."""
    plan = Plan.manual("1,1", stage=stage, passes=2)
    return max(memory_needed(cluster_of(one, one, model=MODEL), plan))


def test_what_is_missing_is_missing_with_recomputation_too():
    small = with_recomputation(device(memory=2 * MB, sample_bytes=30 * MB))
    with pytest.raises(NoPlanFits, match=r"no plan fits at stage 3: rank 0 .* too little"):
        search(cluster_of(small, small, model=MODEL), global_batch=4)


# The search against exhaustive search


def random_cluster(draw: random.Random, ranks: int, stage: int) -> ClusterProfile:
    cluster = planning_oracle.random_cluster(draw, ranks, stage)
    units = len(cluster.model.unit_numels)
    residents = tuple(draw.sample(range(units), draw.choice((0, 0, 1)) if units > 1 else 0))
    model = dataclasses.replace(
        cluster.model,
        unit_names=tuple(f"unit {unit}" for unit in range(units)),
        resident_units=residents,
    )
    changed = {
        one: with_recomputation(
            one,
            slower=draw.choice((1.1, 1.33, 1.5)),
            part=draw.choice((0.1, 0.3, 0.8)),
            times=draw.choice((1, 2)),
        )
        if draw.random() < 0.8
        else one
        for one in dict.fromkeys(cluster.devices)
    }
    devices = tuple(map(changed.__getitem__, cluster.devices))
    return dataclasses.replace(cluster, model=model, devices=devices)


def parts_of(cluster: ClusterProfile, plan: Plan) -> tuple[float, ...]:
    """By rank, the part of the model that a plan recomputes."""
    model = cluster.model
    outside = model.resident_units
    every = sum(numel for unit, numel in enumerate(model.unit_numels) if unit not in outside)
    return tuple(
        sum(model.unit_numels[model.unit_names.index(name)] for name in names) / every
        for names in map(plan.recomputed_units, range(plan.world_size))
    )


def persistent_of(cluster: ClusterProfile, plan: Plan) -> frozenset[int]:
    names = cluster.model.unit_names
    return frozenset(names.index(unit.name) for unit in plan.units if unit.persistent)


CASES = choose(quick=5, full=30)
LARGEST_GLOBAL_BATCH = {1: 8, 2: 5}


@pytest.mark.parametrize("stage", STAGES)
def test_no_number_of_recomputed_units_is_faster(stage):
    """Equal devices recompute equally many units, and every number of units is tried."""
    found = 0
    for seed in range(CASES):
        draw = random.Random(7 * seed + stage)
        ranks = draw.choice((1, 2, 2))
        cluster = random_cluster(draw, ranks, stage)
        global_batch = draw.randint(1, LARGEST_GLOBAL_BATCH[ranks])
        try:
            plan = search(cluster, global_batch=global_batch, stages=(stage,), preference=0.0)
        except NoPlanFits:
            least = 0.0
        else:
            found += 1
            own = Oracle(cluster, stage, persistent_of(cluster, plan), parts_of(cluster, plan))
            assert own.fits(plan.micro_batches, plan.shares, slack=4.0), seed
            expected = own.seconds(plan.micro_batches, plan.shares)
            assert seconds_of(plan) == pytest.approx(expected), seed
            least = seconds_of(plan) * (1 - plan.prediction["optimality_gap"])
        for parts in every_recomputation(cluster):
            oracle = Oracle(cluster, stage, recomputed=parts)
            shares = some_shares(oracle, global_batch, draw)[:10]
            best = oracle.best(global_batch, shares)
            assert best >= least * (1 - 1e-9) if least else math.isinf(best), (seed, parts)
    assert found > CASES / 3


def every_recomputation(cluster: ClusterProfile) -> list[tuple[float, ...]]:
    numels = [
        numel
        for unit, numel in enumerate(cluster.model.unit_numels)
        if unit not in cluster.model.resident_units
    ]
    parts = [sum(numels[:count]) / sum(numels) for count in range(len(numels) + 1)] or [0.0]
    distinct = {device.costs: device for device in cluster.devices}
    choices = [parts if device.recomputed_points else [0.0] for device in distinct.values()]
    return [
        tuple(dict(zip(distinct, chosen, strict=True))[device.costs] for device in cluster.devices)
        for chosen in itertools.product(*choices)
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_recomputation_is_never_slower_and_searches_are_few(stage, monkeypatch):
    searches = []
    inner = saved_memory.fastest_plan_with_persistent_units
    monkeypatch.setattr(
        saved_memory,
        "fastest_plan_with_persistent_units",
        lambda *given: searches.append(1) or inner(*given),
    )
    for seed in range(CASES):
        draw = random.Random(11 * seed + stage)
        cluster = random_cluster(draw, 3, stage)
        request = {"global_batch": draw.randint(4, 30), "stages": (stage,), "preference": 0.0}
        searches.clear()
        try:
            plain = search(cluster, **request, recompute="never")
        except NoPlanFits:
            continue
        assert seconds_of(search(cluster, **request)) <= seconds_of(plain) * (1 + 1e-9), seed
        assert len(searches) <= 6


# A plan with recomputation elsewhere


def recomputing_plan(**changes) -> Plan:
    unit = UnitPlan("blocks.0", recomputed_on=(1,))
    plan = Plan.manual("4,4", stage=1, passes=2)
    return dataclasses.replace(plan, units=(unit,), **changes)


def two_devices() -> ClusterProfile:
    one = with_recomputation(device(memory=4000 * MB, sample_bytes=MB, largest=8))
    return cluster_of(one, one, model=MODEL)


def test_seconds_and_bytes_are_between_none_and_all_units():
    cluster, plan = two_devices(), recomputing_plan()
    plain = dataclasses.replace(plan, units=())
    every = tuple(UnitPlan(n, recomputed_on=(1,)) for n in MODEL.unit_names[1:])
    one, none, all_units = (
        predict(cluster, each) for each in (plan, plain, dataclasses.replace(plan, units=every))
    )
    for what in ("compute_seconds", "memory_bytes"):
        values = [getattr(each, what) for each in (none, one, all_units)]
        assert len({each[0] for each in values}) == 1
        low, middle, high = (each[1] for each in values)
        assert middle == pytest.approx(low + (high - low) / UNITS)
    assert one.memory_bytes[1] < none.memory_bytes[1]
    assert one.compute_seconds[1] > none.compute_seconds[1]
    assert simulate(cluster, plan).step_seconds == pytest.approx(one.step_seconds, rel=0.03)


def test_batches_that_were_measured_only_with_recomputation_need_it():
    cluster = two_devices()
    larger = dataclasses.replace(
        recomputing_plan(), micro_batches=((8, 8), (16, 16)), global_batch=48
    )
    assert fits(cluster, larger)
    assert not fits(cluster, dataclasses.replace(larger, units=()))


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(None, [0.0, 0.25, 0.5, 0.75, 1.0]), (0.9, [0.0, 0.3, 0.6, 0.9, 1.0])],
)
def test_the_last_unit_saves_what_was_measured(saved, expected):
    model = dataclasses.replace(MODEL, saved_without_last_unit=saved)
    units = MODEL.recomputable_units
    found = [saved_part(model, units[:count]) for count in range(UNITS + 1)]
    assert found == pytest.approx(expected)
    assert saved_part(model, units[-1:]) == pytest.approx(1.0 - expected[-2])


def test_observed_passes_are_compared_with_the_curve_of_their_recomputation():
    cluster = two_devices()
    plan = dataclasses.replace(
        recomputing_plan(), micro_batches=((8, 8), (16, 16)), global_batch=48
    )
    before = predict(cluster, plan)
    slower = [1.5 * seconds for seconds in before.compute_seconds]
    seen = Observation(
        plan=plan,
        step_seconds=1.5 * before.step_seconds,
        pass_seconds=tuple((seconds / 2, seconds / 2) for seconds in slower),
        other_seconds=(0.0, 0.0),
    )
    after = predict(refine(cluster, [seen], asynchronous=False), plan)
    assert after.compute_seconds == pytest.approx(slower)
    assert after.step_seconds == pytest.approx(1.5 * before.step_seconds)


@pytest.mark.parametrize(
    ("unit", "complaint"),
    [
        ("root", "unit 'root' cannot be recomputed"),
        ("blocks.9", "names unit 'blocks.9', which the profile does not have"),
    ],
)
def test_units_that_cannot_be_recomputed_are_refused(unit, complaint):
    plan = recomputing_plan()
    plan = dataclasses.replace(plan, units=(dataclasses.replace(plan.units[0], name=unit),))
    with pytest.raises(ValueError, match=complaint):
        predict(two_devices(), plan)


def test_a_profile_without_recomputed_passes_is_refused():
    plain = device(memory=4000 * MB)
    with pytest.raises(ValueError, match=r"rank 1 .* the profile has no passes with recomputation"):
        predict(cluster_of(plain, plain, model=MODEL), recomputing_plan())


# Values


def test_a_plan_with_recomputed_units_as_json_and_text():
    plan = recomputing_plan()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.digest() != dataclasses.replace(plan, units=()).digest()
    assert [line.split()[-1] for line in str(plan).splitlines()[1:]] == ["recomputed", "0", "1"]
    assert "recomputed" not in str(dataclasses.replace(plan, units=()))


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ((0, 2), r"recomputed on ranks \(0, 2\), but the plan has ranks 0 to 1"),
        ((1, 1), r"recomputed_on must be all different, got \(1, 1\)"),
        ((-1,), "must be at least 0"),
    ],
)
def test_invalid_ranks_raise(ranks, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(recomputing_plan(), units=(UnitPlan("a", recomputed_on=ranks),))
