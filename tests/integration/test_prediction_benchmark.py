"""`benchmarks/prediction.py`: its clusters, plans, rows and summaries."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from clusters import cluster_of, device
from hypothesis import given

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import prediction
from prediction_models import Subject
from prediction_plans import CHOSEN, plans_for
from prediction_report import Measurement, by_cluster, in_words, regrets, row_of
from prediction_yardstick import Turn, Yardstick, steadied
from rows import Row

from poplar import Plan, predict, search
from poplar.profiler.passes import Passes
from poplar.values.profile import ClusterProfile

POINTS = (1, 2, 4, 8, 16)
MOST = prediction.parse_options([]).global_batch


def profile(*speeds: float) -> ClusterProfile:
    """Ranks whose passes take 1 ms plus 10 ms per sample, divided by their speed."""
    devices = (
        device(
            speed,
            memory=2**34,
            latency=0.001,
            batches=POINTS,
            sample_bytes=1 << 20,
            optimizer_seconds=0.001 / speed,
        )
        for speed in speeds
    )
    return cluster_of(*devices, communication=0.002, gather=0.001, units=(100_000,) * 4)


CLUSTERS = {"2:1": profile(2, 1), "4:2:1": profile(4, 2, 1), "3:3:1:1": profile(3, 3, 1, 1)}


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


def turn(seconds: float, *slowness: float) -> Turn:
    return Turn(seconds, slowness or (1.0, 1.0))


@given(first=st.floats(0.5, 2.0), second=st.floats(0.5, 2.0), stage=st.integers(0, 3))
def test_steadied_time_corrects_for_slower_ranks(first, second, stage):
    cluster, plan = CLUSTERS["2:1"], Plan.even(2, 24, 16, stage)

    def expected(slowness: Sequence[float]) -> float:
        return prediction.expected_seconds(cluster, plan, slowness)

    taken = expected((first, second))
    assert steadied([turn(taken, first, second)], expected) == pytest.approx(expected((1.0, 1.0)))


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
    row = row_of(
        plan,
        expected,
        3 * expected.step_seconds,
        measured,
        lambda slowness: 3.0 * max(slowness),
        cluster="2:1",
        model="llama",
        plan="even",
    )
    assert row["plan"] == "even"
    assert row["timed_error"] == pytest.approx(-0.75)
    assert row["error"] == pytest.approx(-0.5)
    assert row["simulated_error"] == pytest.approx(0.5)
    assert row["step_interval"] == expected.step_interval


def rows(seconds: Mapping[str, float], stage: int = 1, error: float = 0.0) -> list[Row]:
    case = {"cluster": "2:1", "model": "llama", "stage": stage, "micro_batches": [[8, 16], [12]]}
    case["unprofiled"] = 1 / 3
    errors = {"p50_seconds": 0.36, "error": error, "simulated_error": 0.02, "timed_error": 0.0}
    return [
        Row.of(
            "prediction",
            {**case, "plan": kind},
            errors | {"steady_seconds": own, "step_interval": (0.9 * own, 1.1 * own)},
        )
        for kind, own in seconds.items()
    ]


def test_regret_is_relative_to_the_fastest_other_plan():
    found = regrets(
        rows({CHOSEN: 0.36, "even": 0.5, "proportional": 0.3})
        + rows({CHOSEN: 0.1, "even": 0.2}, stage=3)
    )
    assert [(one["stage"], one["best"]) for one in found] == [(1, "proportional"), (3, "even")]
    assert [one["regret"] for one in found] == [pytest.approx(0.2), pytest.approx(-0.5)]
    assert in_words(found).endswith("-15.0% in the median, above 2% in 1, at most +20.0%")


@pytest.mark.parametrize("cluster", ["", "4:", "2:0", "2:-1", "nan:1", "inf", "a:b"])
def test_clusters_that_are_no_speeds_are_usage_errors(capsys, cluster):
    with pytest.raises(SystemExit):
        prediction.parse_options(["--clusters", "2:1", cluster])
    assert "must be speeds and colons, such as 4:2:1" in capsys.readouterr().err


def test_errors_are_listed_by_cluster_and_for_all():
    found = by_cluster(rows({CHOSEN: 0.3, "even": 0.4}, error=-0.1))
    assert [(row["cluster"], row["plans"]) for row in found] == [("2:1", 2), ("all", 2)]
    assert all(row["median"] == 0.1 and row["in_interval"] == 1.0 for row in found)
