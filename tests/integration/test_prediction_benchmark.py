"""`benchmarks/prediction.py`: its clusters, plans, rows and summaries."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from ranks import Pool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import prediction
from prediction_models import SUBJECTS, Subject
from prediction_plans import CHOSEN, mean_unprofiled, part_unprofiled, plans_for
from prediction_rows import (
    Measurement,
    Row,
    errors,
    of_regrets,
    regrets,
    regrets_table,
    summary,
    table_of,
)
from prediction_yardstick import Turn, Yardstick, steadied

from poplar import HeteroZeroOptimizer, Plan, predict, search, simulate
from poplar.profiler.passes import Passes
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

POINTS = (1, 2, 4, 8, 16)
MOST = prediction.parse_options([]).global_batch


def profile(*speeds: float) -> ClusterProfile:
    """Ranks whose passes take 1 ms plus 10 ms per sample, divided by their speed."""
    devices = tuple(
        DeviceProfile(
            name=f"rank of speed {speed:g}",
            memory_bytes=2**34,
            points=tuple(
                BatchPoint(batch=b, seconds=(0.001 + 0.01 * b) / speed, activation_bytes=b << 20)
                for b in POINTS
            ),
            optimizer_seconds=0.001 / speed,
        )
        for speed in speeds
    )
    return ClusterProfile(
        devices=devices,
        model=ModelProfile(unit_numels=(100_000,) * 4),
        network=NetworkProfile(
            reduce_scatter_seconds=0.002,
            all_gather_seconds=0.001,
            send_seconds_per_byte=(1e-9,) * len(speeds),
            receive_seconds_per_byte=(1e-9,) * len(speeds),
        ),
        overlap=0.0,
    )


CLUSTERS = {"2:1": profile(2, 1), "4:2:1": profile(4, 2, 1), "3:3:1:1": profile(3, 3, 1, 1)}

ROW = Row(
    benchmark="prediction",
    cluster="2:1",
    model="llama",
    stage=1,
    plan=CHOSEN,
    micro_batches=[[8, 16], [12]],
    shares=[0.5, 0.5],
    unprofiled=1 / 3,
    predicted_seconds=0.36,
    simulated_seconds=0.37,
    p20_seconds=0.35,
    p50_seconds=0.36,
    p80_seconds=0.38,
    steady_seconds=0.36,
    timed_error=0.0,
    error=0.0,
    simulated_error=0.02,
    bound="rank 0's compute",
    bystanders=0.1,
    device="a machine",
    versions="torch",
    commit="unknown",
)


# Clusters


def test_quotas_are_proportional_to_speeds(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert prediction.quotas_of("2:1") == (0.8, 0.4)
    assert prediction.quotas_of("4:2:1") == pytest.approx((0.8, 0.4, 0.2))
    assert prediction.quotas_of("1:1:1:1") == pytest.approx((0.4,) * 4), "two cores for four"
    assert sum(prediction.quotas_of("3:3:1:1")) == pytest.approx(1.6)


@pytest.mark.parametrize("cluster", ["", "2:", "fast:slow", "2:0", "2:-1", "1:inf", "1:nan"])
def test_invalid_cluster_raises(cluster):
    with pytest.raises(ValueError, match="speeds and colons, such as 4:2:1, got"):
        prediction.quotas_of(cluster)


def test_quick_runs_fewer_pairs():
    clusters, models = ["2:1", "4:2:1", "3:3:1:1"], ["llama", "encoder", "convolutional"]
    assert len(set(prediction.pairs(clusters, models, quick=False))) == 9
    quick = prediction.pairs(clusters, models, quick=True)
    assert quick == list(zip(clusters, models, strict=True))
    assert prediction.pairs(["2:1"], models[:2], quick=True) == [
        ("2:1", "llama"),
        ("2:1", "encoder"),
    ]


# Models


@pytest.mark.parametrize("name", SUBJECTS)
def test_models_train_with_any_batch(name):
    subject = SUBJECTS[name]
    model = subject.model()
    for samples in (1, 3):
        loss = subject.loss(model, subject.batch(samples))
        assert loss.isfinite()
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    twin = subject.model()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other), "the same weights on every rank"


# Plans


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_plans_of_a_configuration_have_the_same_global_batch(cluster, stage):
    plans = plans_for(CLUSTERS[cluster], stage, most=MOST)
    assert next(iter(plans)) == CHOSEN
    assert len(plans) >= 5
    assert len(set(plans.values())) == len(plans), "no plan twice"
    assert {plan.stage for plan in plans.values()} == {stage}
    (batch,) = {plan.global_batch for plan in plans.values()}
    assert 3 * MOST // 4 <= batch <= MOST
    assert plans[CHOSEN] == search(CLUSTERS[cluster], global_batch=batch, stages=(stage,))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_about_half_of_the_micro_batches_are_unprofiled(cluster, stage):
    plans = plans_for(CLUSTERS[cluster], stage, most=MOST)
    assert mean_unprofiled(plans.values(), CLUSTERS[cluster]) == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("stage", range(4))
def test_every_plan_can_be_predicted_and_simulated(stage):
    cluster = CLUSTERS["4:2:1"]
    for plan in plans_for(cluster, stage, most=MOST).values():
        step = predict(cluster, plan).step_seconds
        assert simulate(cluster, plan).step_seconds == pytest.approx(step, rel=0.1)


def test_empty_micro_batch_is_not_unprofiled():
    plan = Plan(stage=2, global_batch=11, micro_batches=((0, 3), (4, 4)), shares=(0.5, 0.5))
    assert part_unprofiled(plan, CLUSTERS["2:1"]) == pytest.approx(1 / 3)


# What rows say


def test_median_ignores_one_slow_turn():
    measured = Measurement(tuple(map(turn, (1.1, 9.0, 1.3))), 0.0)
    assert measured.seconds == 1.3
    low, high = measured.spread
    assert low <= measured.seconds <= high


def turn(seconds: float, *slowness: float) -> Turn:
    return Turn(seconds, slowness or (1.0, 1.0))


@given(first=st.floats(0.5, 2.0), second=st.floats(0.5, 2.0), stage=st.integers(0, 3))
def test_steadied_time_corrects_for_slower_ranks(first, second, stage):
    cluster, plan = CLUSTERS["2:1"], Plan.even(2, 24, 16, stage)

    def expected(slowness: Sequence[float]) -> float:
        return prediction.expected_seconds(cluster, plan, slowness)

    taken = expected((first, second))
    assert steadied([turn(taken, first, second)], expected) == pytest.approx(expected((1.0, 1.0)))


def test_equal_slowdown_scales_compute_but_not_communication():
    cluster, plan = CLUSTERS["2:1"], Plan.even(2, 24, 16, stage=0)
    step_seconds = predict(cluster, plan).step_seconds
    network = cluster.network.reduce_scatter_seconds + cluster.network.all_gather_seconds
    twice = prediction.expected_seconds(cluster, plan, (2.0, 2.0))
    assert twice == pytest.approx(2 * (step_seconds - network) + network)


def test_yardstick_measures_a_profiled_batch():
    (device, _) = profile(0.25, 1.0).devices
    model = torch.nn.Linear(1, 1)
    subject = Subject(
        new=lambda: model,
        loss=lambda model, batch: model(batch["x"]).mean(),
        draw=lambda samples, generator: {"x": torch.ones(samples, 1)},
    )
    asked: list[tuple[int, int]] = []

    def seconds(self: Passes, size: int, repeats: int) -> float:
        asked.append((size, repeats))
        return 0.972

    with mock.patch.object(Passes, "seconds", seconds), mock.patch.object(Passes, "run") as first:
        assert Yardstick(subject, device).slowness() == pytest.approx(3.0), "0.324 in the profile"
    assert asked == [(8, 2)], "the largest that is short enough, for about as long as is wanted"
    first.assert_called_once_with(8)


def test_errors_are_relative_to_measurements():
    plan = Plan.even(2, 24, 16, stage=0)
    expected = predict(CLUSTERS["2:1"], plan)
    measured = Measurement((turn(4 * expected.step_seconds, 2.0, 2.0),) * 3, 0.0)
    row = Row.of(
        plan,
        expected,
        3 * expected.step_seconds,
        measured,
        lambda slowness: 3.0 * max(slowness),
        cluster="2:1",
        model="llama",
        kind="even",
        unprofiled=0.0,
    )
    assert row.timed_error == pytest.approx(-0.75)
    assert row.error == pytest.approx(-0.5)
    assert row.simulated_error == pytest.approx(0.5)
    assert row.global_batch == 24
    assert row.seconds_per_sample == pytest.approx(expected.step_seconds / 12)
    assert Row(**json.loads(json.dumps(asdict(row)))) == row


def test_errors_are_absolute():
    assert errors([-0.04, 0.01, 0.02]) == {"median": 0.02, "p90": 0.036, "worst": 0.04}
    assert errors([-0.04]) == {"median": 0.04, "p90": 0.04, "worst": 0.04}


def rows(seconds: Mapping[str, float], **more: object) -> list[Row]:
    return [
        replace(ROW, plan=kind, steady_seconds=measured, **more)
        for kind, measured in seconds.items()
    ]


def test_regret_is_relative_to_the_fastest_other_plan():
    found = regrets(
        rows({CHOSEN: 0.36, "even": 0.5, "proportional": 0.3})
        + rows({CHOSEN: 0.1, "even": 0.2}, stage=3)
    )
    assert [(one.stage, one.best) for one in found] == [(1, "proportional"), (3, "even")]
    assert [one.regret for one in found] == [pytest.approx(0.2), pytest.approx(-0.5)]


def test_regret_is_per_sample():
    chosen, *_ = rows({CHOSEN: 0.36})
    half = replace(chosen, plan="even", micro_batches=[[8], [10]], steady_seconds=0.18)
    assert regrets([chosen, half])[0].regret == pytest.approx(0.0)


def test_regret_needs_a_chosen_and_another_plan():
    assert regrets(rows({"even": 0.3, "proportional": 0.2})) == []
    assert regrets(rows({CHOSEN: 0.3})) == []
    assert of_regrets([]) == {"configurations": 0}


def test_summary_has_errors_and_regrets():
    found = rows({CHOSEN: 0.309, "even": 0.3}) + rows(
        {CHOSEN: 0.2, "even": 0.4}, stage=3, model="encoder", error=-0.1, simulated_error=0.0
    )
    found_summary = summary(found)
    assert found_summary["plans"] == 4
    assert found_summary["unprofiled"] == pytest.approx(0.333)
    assert found_summary["closed_form"]["worst"] == 0.1
    assert found_summary["closed_form"]["by_stage"]["3"]["median"] == 0.1
    assert found_summary["closed_form"]["by_model"]["llama"]["worst"] == 0.0
    assert found_summary["simulated"]["by_model"] == {
        "llama": {"median": 0.02, "p90": 0.02, "worst": 0.02},
        "encoder": {"median": 0.0, "p90": 0.0, "worst": 0.0},
    }
    assert set(found_summary["simulated"]["by_cluster"]) == {"2:1"}
    assert found_summary["regret"] == {
        "configurations": 2,
        "median": -0.235,
        "p90": -0.023,
        "worst": 0.03,
        "above_2_percent": 1,
    }
    assert found_summary["as_timed"]["closed_form"]["worst"] == 0.0
    assert found_summary["as_timed"]["regret"]["worst"] == 0.0, "timed, all took the same"
    json.dumps(found_summary)


def test_tables_have_a_line_per_row():
    found = rows({CHOSEN: 0.306, "even": 0.3})
    assert table_of(found).row_count == 2
    assert regrets_table(regrets(found)).row_count == 1


# On ranks


def measured_turns() -> tuple[dict[str, tuple[Turn, ...]], list[str]]:
    """The turns of each plan, and the order in which plans ran."""
    plans = {
        "even": Plan.even(4, 8, 2, stage=1),
        "nothing for the last": Plan.manual("4,2,2,0", stage=1, shares=(0.5, 0.3, 0.2, 0.0)),
    }
    ran: list[str] = []
    apply_plan = HeteroZeroOptimizer.apply_plan

    def noted(optimizer: HeteroZeroOptimizer, plan: Plan) -> None:
        ran.append(next(kind for kind, other in plans.items() if other == plan))
        apply_plan(optimizer, plan)

    with mock.patch.object(HeteroZeroOptimizer, "apply_plan", noted):
        slow = profile(*(0.02,) * 4)  # so that the yardstick is one short pass
        measured = prediction.run_in_turns(SUBJECTS["encoder"], slow, plans, rounds=2, steps=2)
    return {kind: one.turns for kind, one in measured.items()}, ran


def test_plans_run_in_turns(ranks: Pool) -> None:
    found = ranks.run(measured_turns)
    assert all(rank == found[0] for rank in found)
    turns, ran = found[0]
    assert ran == ["even", "nothing for the last"] * 2
    for own in turns.values():
        assert len(own) == 2
        assert all(turn.seconds > 0 and len(turn.slowness) == 4 for turn in own)


# The command line


def test_quick_changes_defaults_only():
    full, quick = prediction.parse_options([]), prediction.parse_options(["--quick"])
    assert (quick.rounds, quick.steps) < (full.rounds, full.steps)
    assert quick.seconds < full.seconds
    assert prediction.parse_options(["--quick", "--rounds", "7"]).rounds == 7
    assert full.clusters == ["2:1", "4:2:1", "3:3:1:1"]
    assert full.models == ["llama", "encoder", "convolutional"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clusters", "2:fast"], "--clusters: a cluster must be speeds and colons"),
        (["--models", "bert"], "invalid choice: 'bert'"),
        (["--stages", "4"], "invalid choice: 4"),
        (["--global-batch", "11"], "--global-batch must be at least 12, got 11"),
        (["--rounds", "1"], "--rounds must be at least 2, got 1"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds must be at least 0.1, got 0.0"),
        (["--max-batch", "0"], "--max-batch must be at least 1, got 0"),
    ],
)
def test_invalid_command_line_raises(arguments, message, capsys):
    with pytest.raises(SystemExit):
        prediction.parse_options(arguments)
    assert message in capsys.readouterr().err
