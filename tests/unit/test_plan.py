"""Plans: validation, constructors, short batches, JSON and the printed table."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.values.plan import Plan, UnitPlan

STAGES = (0, 1, 2, 3)


def random_plan(seed: int) -> Plan:
    """A random valid plan: ranks without samples, empty passes, ranks without a share."""
    draw = random.Random(seed)
    stage, world_size = draw.choice(STAGES), draw.randint(1, 6)
    synchronizations = draw.randint(1, 4)
    micro_batches = tuple(
        tuple(
            draw.choice((0, 1, 2, draw.randint(0, 20)))
            for _ in range(synchronizations if stage >= 2 else draw.randint(0, 4))
        )
        for _ in range(world_size)
    )
    if not any(map(sum, micro_batches)):
        micro_batches = ((1,) * synchronizations, *micro_batches[1:])
    parts = [draw.choice((0, draw.random())) for _ in range(world_size)]
    parts[draw.randrange(world_size)] += 0.1
    return Plan(
        stage=stage,
        global_batch=sum(map(sum, micro_batches)),
        micro_batches=micro_batches,
        shares=tuple(part / sum(parts) for part in parts),
    )


plans = st.builds(random_plan, st.integers(0, 2**32))
speeds = st.lists(st.floats(0, 1000), min_size=1, max_size=6).filter(lambda s: max(s) > 1e-3)


def spelled_out(**changes) -> Plan:
    fields = {
        "stage": 2,
        "global_batch": 12,
        "micro_batches": ((1, 4), (2, 3), (0, 2)),
        "shares": (0.5, 0.5, 0),
    }
    return Plan(**{**fields, **changes})


# Accessors


def test_a_plan_has_samples_passes_and_offset_of_each_rank():
    plan = spelled_out()
    assert plan.world_size == 3
    assert [plan.samples(rank) for rank in range(3)] == [5, 5, 2]
    assert [plan.passes(rank) for rank in range(3)] == [2, 2, 2]
    assert [plan.offset(rank) for rank in range(3)] == [0, 5, 10]


@pytest.mark.parametrize("rank", [-1, 3])
def test_an_unknown_rank_raises(rank):
    for ask in (spelled_out().samples, spelled_out().passes, spelled_out().offset):
        with pytest.raises(ValueError, match=f"rank {rank}: this plan has ranks 0 to 2"):
            ask(rank)


def test_a_plan_is_immutable_hashable_and_picklable():
    plan = spelled_out(micro_batches=[[1, 4], [2, 3], [0, 2]], shares=[0.5, 0.5, 0])
    assert plan == spelled_out()
    assert hash(plan) == hash(spelled_out())
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.stage = 3


def test_the_prediction_is_ignored_by_equality_hash_and_digest():
    plan = spelled_out(prediction={"step_seconds": 1.5})
    assert plan == spelled_out()
    assert hash(plan) == hash(spelled_out())
    assert plan.digest() == spelled_out().digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 3},
        {"micro_batches": ((5, 0), (3, 2), (0, 2))},
        {"shares": (0.5, 0.25, 0.25)},
        {"units": (UnitPlan("layers.0"),)},
        {"transport": "shared_memory"},
    ],
)
def test_a_prediction_belongs_to_one_plan(changes):
    plan = spelled_out(prediction={"step_seconds": 1.5, "digest": spelled_out().digest()})
    assert plan.prediction["step_seconds"] == 1.5
    assert Plan.from_dict(plan.to_dict()).prediction == plan.prediction
    changed = dataclasses.replace(plan, **changes)
    assert changed.prediction is None
    edited = {**plan.to_dict(), **{name: changed.to_dict()[name] for name in changes}}
    assert "predicted" not in str(Plan.from_dict(edited))


def test_different_plans_have_different_digests():
    different = [
        spelled_out(),
        spelled_out(stage=3),
        spelled_out(micro_batches=((1, 4), (3, 2), (0, 2))),
        spelled_out(shares=(0.5, 0.25, 0.25)),
        spelled_out(units=(UnitPlan("layers.0"),)),
    ]
    assert len({plan.digest() for plan in different}) == len(different)
    assert spelled_out(shares=(0.5, 0.5, -0.0)).digest() == spelled_out().digest()


# Invalid plans


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"stage": 4}, ValueError, "stage must be 0, 1, 2 or 3, got 4"),
        ({"stage": True}, TypeError, "stage must be a whole number, got True"),
        ({"global_batch": 13}, ValueError, "sum to 12 samples, but global_batch is 13"),
        ({"global_batch": 12.0}, TypeError, r"global_batch must be a whole number, got 12\.0"),
        ({"micro_batches": ()}, ValueError, "micro_batches must be one tuple per rank"),
        ({"micro_batches": (5, 5, 2)}, TypeError, r"micro_batches\[0\] must be a sequence, got 5"),
        (
            {"micro_batches": ((1, 4), (2, -1), (0, 2))},
            ValueError,
            r"Plan\.micro_batches\[1\]\[1\] must be at least 0, got -1",
        ),
        ({"micro_batches": ((1, 4), (5,), (0, 2))}, ValueError, "rank 1 has 1 passes and rank 0"),
        ({"shares": (0.5, 0.5)}, ValueError, "2 shares for 3 ranks"),
        (
            {"shares": (0.5, 0.4, 0)},
            ValueError,
            r"sum to 1 \(divide each by their sum\), got \(0\.5, 0\.4, 0\.0\)",
        ),
        (
            {"shares": (1.5, -0.5, 0)},
            ValueError,
            r"shares\[1\] must be finite and at least 0, got -0\.5",
        ),
        ({"shares": (math.nan, 1, 0)}, ValueError, r"shares\[0\] must be finite .* got nan"),
        ({"shares": "even"}, TypeError, "shares must be a sequence, got 'even'"),
        ({"host_state": (0.5, 1)}, ValueError, "host_state has 2 parts for 3 ranks"),
        (
            {"host_state": (0.5, 0, 1.5)},
            ValueError,
            r"host_state\[2\] must be from 0 to 1, got 1.5",
        ),
        ({"units": ("layers.0",)}, TypeError, r"units\[0\] must be a UnitPlan .* got 'layers.0'"),
    ],
)
def test_an_invalid_plan_raises(changes, error, complaint):
    with pytest.raises(error, match=complaint):
        spelled_out(**changes)


@pytest.mark.parametrize("stage", [0, 1])
def test_before_stage_2_ranks_may_have_different_numbers_of_passes(stage):
    plan = spelled_out(stage=stage, micro_batches=((1, 4, 4), (3,), ()))
    assert [plan.passes(rank) for rank in range(3)] == [3, 1, 0]


def test_a_unit_may_be_persistent_and_have_its_own_shares():
    unit = UnitPlan("layers.0", shares=[0, 0.5, 0.5], persistent=True)
    assert spelled_out(stage=3, units=[unit]).units == (unit,)
    assert unit.shares == (0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda: UnitPlan(3), TypeError, "must be a string, got 3"),
        (
            lambda: UnitPlan("a", shares=(1, 1)),
            ValueError,
            "UnitPlan.shares must be numbers that sum to 1",
        ),
        (lambda: UnitPlan("a", persistent=1), TypeError, "True or False, got 1"),
        (
            lambda: spelled_out(units=(UnitPlan("a", persistent=True),)),
            ValueError,
            "unit 'a' is persistent at stage 2, where all parameters are",
        ),
        (
            lambda: spelled_out(units=(UnitPlan("a", shares=(1,)),)),
            ValueError,
            "unit 'a' has 1 shares for 3 ranks",
        ),
        (
            lambda: spelled_out(units=(UnitPlan("a"),) * 2),
            ValueError,
            "unit 'a' has two entries",
        ),
    ],
)
def test_an_invalid_unit_raises(make, error, complaint):
    with pytest.raises(error, match=complaint):
        make()


# Constructors


@pytest.mark.parametrize("stage", STAGES)
def test_even_gives_all_ranks_the_same_passes_with_the_remainder_first(stage):
    plan = Plan.even(world_size=3, global_batch=30, micro_batch=4, stage=stage)
    assert plan.micro_batches == ((2, 4, 4),) * 3
    assert plan.shares == pytest.approx((1 / 3,) * 3)
    assert plan.stage == stage


def test_even_with_a_batch_that_does_not_divide():
    assert Plan.even(2, 9, 4, stage=0).micro_batches == ((1, 4), (4,))
    assert Plan.even(2, 9, 4, stage=3).micro_batches == ((1, 4), (0, 4))
    assert Plan.even(3, 2, 4, stage=0).micro_batches == ((1,), (1,), ())


def test_manual_gives_each_rank_its_micro_batch():
    plan = Plan.manual("2,2,2,15", stage=1, passes=2)
    assert plan.global_batch == 42
    assert plan.micro_batches == ((2, 2), (2, 2), (2, 2), (15, 15))
    assert plan.shares == (0.25,) * 4
    assert Plan.manual([2, 2, 2, 15], stage=1, passes=2) == plan


def test_manual_accepts_ranks_without_samples_and_shares():
    assert Plan.manual("4, 0", stage=0, passes=2).micro_batches == ((4, 4), ())
    assert Plan.manual("4,0", stage=2, passes=2).micro_batches == ((4, 4), (0, 0))
    assert Plan.manual("4,0", stage=2, shares=(0.25, 0.75)).shares == (0.25, 0.75)


@pytest.mark.parametrize("text", ["", "2,x", "2;3", "2,,3", "1.5,2"])
def test_manual_raises_for_invalid_text(text):
    with pytest.raises(ValueError, match="as in '2,2,2,15', got"):
        Plan.manual(text, stage=0)


def test_manual_raises_without_samples():
    with pytest.raises(ValueError, match=r"micro_batches\[1\] must be at least 0, got -1"):
        Plan.manual("2,-1", stage=0)
    with pytest.raises(ValueError, match="global_batch must be at least 1, got 0"):
        Plan.manual("0,0", stage=0)


@pytest.mark.parametrize("stage", [0, 1])
def test_proportional_gives_each_rank_the_fewest_passes_before_stage_2(stage):
    plan = Plan.proportional([3, 1, 0], 24, stage, max_micro_batch=8)
    assert plan.micro_batches == ((2, 8, 8), (6,), ())


@pytest.mark.parametrize("stage", [2, 3])
def test_proportional_spreads_samples_over_equal_passes_from_stage_2(stage):
    plan = Plan.proportional([3, 1, 0], 24, stage, max_micro_batch=8)
    assert plan.micro_batches == ((6, 6, 6), (2, 2, 2), (0, 0, 0))
    plan = Plan.proportional([3, 1], 26, stage, max_micro_batch=10)
    assert plan.micro_batches == ((10, 10), (3, 3))
    plan = Plan.proportional([3, 1], 27, stage, max_micro_batch=[7, 4])
    assert plan.micro_batches == ((6, 7, 7), (2, 2, 3))


@given(
    speeds=speeds,
    global_batch=st.integers(1, 300),
    stage=st.sampled_from(STAGES),
    most=st.integers(1, 40),
)
def test_proportional_is_within_one_sample_of_the_speeds_and_within_the_limit(
    speeds, global_batch, stage, most
):
    plan = Plan.proportional(speeds, global_batch, stage, most)
    assert plan.global_batch == global_batch
    for rank, speed in enumerate(speeds):
        fair = global_batch * speed / sum(speeds)
        assert abs(plan.samples(rank) - fair) < 1 + 1e-6 * global_batch
        assert max(plan.micro_batches[rank], default=0) <= most
        if stage < 2:
            assert plan.passes(rank) == -(-plan.samples(rank) // most)
    if stage >= 2:
        assert plan.passes(0) == max(-(-plan.samples(r) // most) for r in range(len(speeds)))
        for passes in plan.micro_batches:
            assert sorted(passes) == list(passes)
            assert passes[-1] - passes[0] <= 1


def test_proportional_accepts_shares_and_a_limit_per_rank():
    plan = Plan.proportional([1, 1], 8, 0, [4, 0], shares=(0.75, 0.25))
    assert plan.micro_batches == ((4, 4), ())
    assert plan.shares == (0.75, 0.25)


@pytest.mark.parametrize(
    ("speeds", "most", "complaint"),
    [
        ([1, -1], 4, r"speeds\[1\] must be finite and at least 0, got -1"),
        ([math.inf, 1], 4, r"speeds\[0\] must be finite"),
        ([0, 0], 4, "no rank can take a sample"),
        ([1, 0], [0, 4], "no rank can take a sample"),
        ([1, 1], [4], "1 values of max_micro_batch for 2 speeds"),
        ([1, 1], 0, r"no rank can take a sample: .* max_micro_batch \[0, 0\]"),
        ([], 4, "no rank can take a sample"),
    ],
)
def test_proportional_raises_for_invalid_arguments(speeds, most, complaint):
    with pytest.raises(ValueError, match=complaint):
        Plan.proportional(speeds, 8, 0, most)


# Short batches


@given(plan=plans, data=st.data())
def test_a_short_batch_is_cut_in_the_planned_proportions(plan, data):
    planned = [plan.samples(rank) for rank in range(plan.world_size)]
    working = sum(count > 0 for count in planned)
    samples = data.draw(st.integers(working, plan.global_batch))
    cut = plan.cut(samples)
    assert sum(cut) == samples
    assert samples < plan.global_batch or list(cut) == planned
    quotas = [count * samples / plan.global_batch for count in planned]
    all_quotas_at_least_one = all(quota >= 1 for quota in quotas if quota)
    for count, whole, quota in zip(cut, planned, quotas, strict=True):
        assert min(whole, 1) <= count <= whole
        assert abs(count - quota) < 1 or not all_quotas_at_least_one


def test_a_short_batch_keeps_one_sample_for_every_working_rank():
    plan = Plan.manual("1,0,1,98", stage=0)
    assert plan.cut(100) == (1, 0, 1, 98)
    assert plan.cut(50) == (1, 0, 1, 48)
    assert plan.cut(3) == (1, 0, 1, 1)


def test_a_batch_that_cannot_be_cut_raises():
    plan = Plan.manual("1,0,1,98", stage=0)
    with pytest.raises(ValueError, match="2 samples cannot give one to each of the 3 ranks"):
        plan.cut(2)
    with pytest.raises(ValueError, match="101 samples, but the plan's is 100"):
        plan.cut(101)


def test_samples_fill_passes_in_order():
    plan = Plan(stage=2, global_batch=13, micro_batches=((1, 4, 4), (0, 2, 2)), shares=(0.5, 0.5))
    assert plan.micro_batch_sizes(0, 9) == (1, 4, 4)
    assert plan.micro_batch_sizes(0, 4) == (1, 3, 0)
    assert plan.micro_batch_sizes(1, 1) == (0, 1, 0)
    assert plan.micro_batch_sizes(1, 0) == (0, 0, 0)
    with pytest.raises(ValueError, match=r"rank 1: a batch of 5 samples, .* gives this rank 4"):
        plan.micro_batch_sizes(1, 5)


@given(plan=plans, data=st.data())
def test_no_pass_of_a_short_batch_is_larger_than_planned(plan, data):
    for rank, planned in enumerate(plan.micro_batches):
        samples = data.draw(st.integers(0, sum(planned)))
        sizes = plan.micro_batch_sizes(rank, samples)
        assert sum(sizes) == samples
        assert len(sizes) == len(planned)
        assert all(size <= whole for size, whole in zip(sizes, planned, strict=True))


# Files


@given(plan=plans)
def test_json_round_trip(plan):
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.digest() == plan.digest()


def test_file_round_trip(tmp_path):
    units = (
        UnitPlan("layers.0", persistent=True),
        UnitPlan("layers.1", shares=(0.5, 0.25, 0.25)),
    )
    plan = spelled_out(stage=3, units=units, prediction={"step_seconds": 1.5})
    plan.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == plan
    assert again.prediction == {"step_seconds": 1.5}


def test_state_in_host_memory_is_written_printed_and_read():
    plan = spelled_out(host_state=(0, 0.5, 1))
    assert [plan.part_on_host(rank) for rank in range(3)] == [0.0, 0.5, 1.0]
    assert Plan.from_dict(plan.to_dict()) == plan != spelled_out()
    assert [line.split()[-2:] for line in str(plan).splitlines()[1:]] == [
        ["on", "host"],
        ["0", "%"],
        ["50", "%"],
        ["100", "%"],
    ]
    assert spelled_out(host_state=(0, 0, 0)) == spelled_out()
    assert spelled_out().part_on_host(2) == 0.0


def test_factored_layers_are_written_and_read():
    plan = spelled_out()
    factored = dataclasses.replace(plan, factored=["head", "body.0"])
    assert factored.factored == ("body.0", "head")
    assert Plan.from_dict(json.loads(json.dumps(factored.to_dict()))) == factored
    assert factored.digest() != plan.digest()
    assert "gradients sent as factors: body.0, head" in str(factored)
    with pytest.raises(ValueError, match=r"Plan\.factored must be all different"):
        dataclasses.replace(plan, factored=("head", "head"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": None}, "not a plan written by Plan.to_json: it has no field 'version'"),
        ({"devices": []}, "this is a profile, not a plan"),
        ({"version": 7}, "plan format 7, but this version of Poplar reads format 1"),
        ({"shares": None, "stage": None}, "stage is missing"),
        ({"sharess": [1]}, "sharess is unknown; expected stage, global_batch"),
        ({"micro_batches": 3}, "micro_batches must be a sequence, got 3"),
        ({"global_batch": "12"}, "global_batch must be a whole number, got '12'"),
        ({"units": [{"shares": None}]}, r"units\[0\]\.name is missing"),
        ({"units": ["a"]}, r"units\[0\] must be a UnitPlan or a table of its fields, got 'a'"),
        ({"units": 3}, "units must be a sequence, got 3"),
        ({"prediction": 3}, "prediction must be a mapping, got 3"),
    ],
)
def test_wrong_fields_raise_with_the_file_and_the_field(tmp_path, changes, complaint):
    content = {**spelled_out().to_dict(), **changes}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=rf"plan\.json: .*{complaint}"):
        Plan.from_json(path)


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "sta', b"\xff\xfe\x00"])
def test_a_file_that_is_not_json_raises(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json is damaged or not JSON .*; write it again"):
        Plan.from_json(path)


def test_a_file_with_other_json_raises(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[1, 2]")
    with pytest.raises(
        ValueError, match=r"plan\.json: this is not a plan written by Plan\.to_json"
    ):
        Plan.from_json(path)


# The printed table


def test_a_plan_prints_as_a_table():
    plan = Plan(
        stage=0, global_batch=29, micro_batches=((3, 8, 8), (10,), ()), shares=(0.5, 0.475, 0.025)
    )
    assert str(plan).splitlines() == [
        "stage 0 (replicated), global batch 29, 3 ranks",
        "rank  samples  passes      share",
        "   0       19  1x3 + 2x8  50.0 %",
        "   1       10  1x10       47.5 %",
        "   2        0  none        2.5 %",
    ]


def test_a_table_of_many_ranks_prints_equal_neighbours_as_one_line():
    plan = Plan.proportional([2.0] * 999 + [1.0], 1999, 2, 8)
    lines = str(plan).splitlines()
    assert len(lines) == 4
    assert lines[2].split() == ["0-998", "2", "1x2", "0.1", "%"]
    assert lines[3].split() == ["999", "1", "1x1", "0.1", "%"]


def predicted(**changes) -> dict:
    return {
        "step_seconds": 1.05,
        "samples_per_second": 27.6,
        "compute_seconds": [0.95, 0.0421, 0.0],
        "memory_bytes": [3.1 * 2**30, 700 * 2**20, 2**30],
        "memory_limit_bytes": [8 * 2**30, 900 * 2**20, 4 * 2**30],
        "busy_fraction": [0.924, 0.05, 0.0],
        "bound": "rank 0's compute (92 % busy)",
        "optimality_gap": 0.0,
        "devices": ["RTX 4090", "T4", "T4"],
        **changes,
    }


def test_a_predicted_plan_prints_costs_per_rank_and_the_bound():
    plan = Plan(
        stage=0,
        global_batch=29,
        micro_batches=((3, 8, 8), (10,), ()),
        shares=(0.5, 0.475, 0.025),
        prediction=predicted(),
    )
    assert str(plan).splitlines() == [
        "stage 0 (replicated), global batch 29, 3 ranks",
        "rank  device    samples  passes      share  compute              memory  busy",
        "   0  RTX 4090       19  1x3 + 2x8  50.0 %   0.95 s    3.10 of 8.00 GiB  92 %",
        "   1  T4             10  1x10       47.5 %  42.1 ms  700.0 of 900.0 MiB   5 %",
        "   2  T4              0  none        2.5 %     0 ms    1.00 of 4.00 GiB   0 %",
        "predicted 1.05 s a step, 27.6 samples/s; bound by rank 0's compute (92 % busy)",
    ]


def test_a_partial_prediction_prints_the_columns_that_it_has():
    plan = spelled_out(prediction={"step_seconds": 0.02, "memory_bytes": [1], "note": "mine"})
    lines = str(plan).splitlines()
    assert lines[:-1] == str(spelled_out()).splitlines()
    assert lines[-1] == "predicted 20 ms a step"
    fast = spelled_out(prediction=predicted(samples_per_second=1234.5, optimality_gap=0.0031))
    assert "1234 samples/s" in str(fast)
    assert str(fast).endswith("; at most 0.31 % from the fastest plan")
