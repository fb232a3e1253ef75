"""Plans and intervals on simulated machines with noise: a short form of `benchmarks/noise.py`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
from records import cluster

from poplar.planner.prediction import MODEL_ERROR, predict
from poplar.planner.what_if import with_slower_devices
from poplar.values.observation import Observation, Trials
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from noise import NOISES, simulate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLAN, OTHER = (Plan.even(2, 8, micro_batch, 0) for micro_batch in (4, 2))


def test_tuned_plans_are_near_the_best_ones_and_intervals_hold():
    rows = [simulate(seed) for seed in range(3 * len(NOISES))]
    regrets = [row["tuned_regret"] for row in rows]
    assert median(regrets) < 0.01
    assert fmean(regrets) < 0.02
    assert fmean(row["tuned_covered"] for row in rows) > 0.7
    assert fmean(row["profiled_covered"] for row in rows) > 0.7


def test_intervals_hold_on_saved_rows():
    """Steps are corrected for changes of the machine's speed. Wide intervals prove nothing."""
    lines = (BENCHMARKS / "results" / "prediction.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line)["figures"] for line in lines]
    within = [
        low <= row["steady_seconds"] <= high for row in rows for low, high in [row["step_interval"]]
    ]
    assert 0.75 <= fmean(within) <= 0.9
    widths = [
        (high - low) / row["predicted_seconds"]
        for row in rows
        for low, high in [row["step_interval"]]
    ]
    assert median(widths) < 2 * 0.1, "not called noisy"


def noisy(noise: float, *ranks: int, of: int = 2) -> ClusterProfile:
    """Equal ranks, of which these have pass times with this error."""
    known = cluster((10.0,) * of, ["cpu"] * of)
    devices = list(known.devices)
    for rank in ranks:
        points = (replace(p, spread_seconds=noise * p.seconds) for p in devices[rank].points)
        devices[rank] = replace(devices[rank], points=tuple(points))
    return replace(known, devices=tuple(devices))


def test_interval_of_quiet_ranks_is_the_error_of_the_model():
    predicted = predict(noisy(0.0), PLAN)
    assert predicted.error == pytest.approx(MODEL_ERROR)
    assert sum(predicted.step_interval) == pytest.approx(2.0 * predicted.step_seconds)


def test_noise_makes_the_interval_wider_and_the_step_rather_longer():
    one, both = (predict(noisy(0.2, *ranks), PLAN) for ranks in ([0], [0, 1]))
    assert one.error > MODEL_ERROR
    low, high = both.step_interval
    assert high - both.step_seconds > both.step_seconds - low
    assert low <= both.step_seconds


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1, 0.4])
def test_the_predicted_step_is_inside_of_its_interval(ranks, noise):
    predicted = predict(noisy(noise, *range(ranks), of=ranks), Plan.even(ranks, 4 * ranks, 4, 0))
    low, high = predicted.step_interval
    assert low <= predicted.step_seconds <= high


def test_batches_between_the_points_of_a_curve_with_steps_are_less_certain():
    known = noisy(0.0)
    stepped = [
        replace(p, batch=batch, seconds=seconds)
        for p, batch, seconds in zip(
            known.devices[0].points * 5, (1, 2, 4, 8, 16), (0.1, 0.2, 0.2, 0.2, 0.4), strict=False
        )
    ]
    devices = tuple(replace(device, points=tuple(stepped)) for device in known.devices)
    even = Plan.even(2, 16, 8, 0), Plan.even(2, 12, 6, 0)
    measured, between = (predict(replace(known, devices=devices), plan).error for plan in even)
    assert measured == pytest.approx(MODEL_ERROR)
    assert between > 2 * MODEL_ERROR


def test_interval_scales_with_the_step():
    slow = with_slower_devices(noisy(0.1, 0, 1), (2.0, 2.0))
    assert predict(slow, PLAN).error == pytest.approx(
        predict(noisy(0.1, 0, 1), PLAN).error, rel=0.1
    )


def trials(*turns: tuple[float, float], noise: float = 0.0) -> Trials:
    found = Trials(noise)
    for seconds in turns:
        found.add([_seen(plan, s) for plan, s in zip((PLAN, OTHER), seconds, strict=True)])
    return found


def _seen(plan: Plan, seconds: float) -> Observation:
    return Observation(plan=plan, step_seconds=seconds, pass_seconds=(), other_seconds=())


def test_one_turn_decides_only_if_it_is_clear():
    assert trials((1.5, 1.0)).is_slower(PLAN, OTHER, by=0.04)
    assert not trials((1.15, 1.0)).is_slower(PLAN, OTHER, by=0.04)
    assert trials((1.15, 1.0), (1.15, 1.0)).is_slower(PLAN, OTHER, by=0.04)


def test_noise_that_is_known_before_makes_a_turn_count_less():
    assert trials((1.5, 1.0)).is_slower(PLAN, OTHER)
    assert not trials((1.5, 1.0), noise=0.3).is_slower(PLAN, OTHER)


def test_turns_that_differ_make_the_step_uncertain():
    steady, varying = trials((1.0, 1.0), (1.0, 1.0)), trials((1.0, 1.3), (1.3, 1.0))
    assert steady.error(PLAN) == steady.noise(PLAN) == 0.0
    assert varying.error(PLAN) > 0.05
