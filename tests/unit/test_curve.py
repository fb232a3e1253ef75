"""Monotone curves through measured points, and curves that noisy points show together."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.values.curve import MonotoneCurve, deviation, fitted, pooled, usual_value

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from published_curves import CURVES

DEVICES = 80

Seconds = Callable[[int], float]


def straight(draw: random.Random) -> Seconds:
    latency = draw.choice((0.0, 1.0, 4.0, 16.0, 40.0))
    return lambda batch: latency + batch


def flat_then_straight(draw: random.Random) -> Seconds:
    full, latency = draw.randint(2, 20), draw.choice((0.0, 2.0))
    return lambda batch: latency + max(full, batch)


def tiled(draw: random.Random) -> Seconds:
    tile, latency = draw.choice((2, 3, 4, 6, 8, 12, 16)), draw.choice((0.0, 2.0, 8.0))
    return lambda batch: latency + math.ceil(batch / tile) * tile


@given(st.lists(st.floats(0.0, 10.0), max_size=8))
def test_pooled_values_are_monotone_and_keep_their_sum(values):
    found = pooled(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))


@pytest.mark.parametrize("real", CURVES, ids=lambda curve: f"{curve.model} on {curve.gpu}")
def test_published_curves_are_interpolated_within_a_few_percent(real):
    """Each inner point is left out in turn."""
    for left_out in sorted(real.seconds)[1:-1]:
        others = {batch: took for batch, took in real.seconds.items() if batch != left_out}
        curve = MonotoneCurve(tuple(others), tuple(others.values()))
        assert curve.at(left_out) == pytest.approx(real.seconds[left_out], rel=0.1)


# Noisy points of one curve


SIZES = (1, 2, 4, 8, 16)


def noisy(truth: Seconds, noise: float, draw: random.Random) -> tuple[list[float], list[float]]:
    values = [truth(batch) * (1.0 + noise * draw.gauss(0.0, 1.0)) for batch in SIZES]
    return values, [noise * value for value in values]


def gains(shape: Callable[[random.Random], Seconds], noise: float) -> float:
    """Errors of fitted values over those of the values themselves, on many devices."""
    draw, after, before = random.Random(0), 0.0, 0.0
    for _ in range(DEVICES):
        truth = shape(draw)
        values, errors = noisy(truth, noise, draw)
        found, _ = fitted(SIZES, values, errors)
        for batch, own, value in zip(SIZES, found, values, strict=True):
            after += abs(own / truth(batch) - 1.0)
            before += abs(value / truth(batch) - 1.0)
    return after / before


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_fitting_a_noisy_line_reduces_its_errors(noise):
    assert gains(straight, noise) < 0.8


@pytest.mark.parametrize("shape", [flat_then_straight, tiled])
@pytest.mark.parametrize("noise", [0.002, 0.02, 0.1, 0.3])
def test_fitting_other_curves_does_not_add_errors(shape, noise):
    assert gains(shape, noise) < 1.02


def test_one_lucky_value_moves_nothing():
    """A batch of 2 that seems to take half of its time does not become the best one."""
    values = [10.0 + 5.0 * batch for batch in SIZES]
    values[1] *= 0.5
    found, _ = fitted(SIZES, values, [0.3 * value for value in values])
    per_sample = [value / batch for value, batch in zip(found, SIZES, strict=True)]
    assert per_sample == sorted(per_sample, reverse=True)


def test_no_latency_is_negative():
    values = [0.5, 1.9, 4.1, 8.2, 16.1]
    found, _ = fitted(SIZES, values, [0.5 * value for value in values])
    per_sample = [value / batch for value, batch in zip(found, SIZES, strict=True)]
    assert per_sample == pytest.approx([per_sample[0]] * len(SIZES), rel=1e-3)


def test_errors_of_fitted_values_are_those_that_are_left():
    """Two thirds of the true values are within one standard error."""
    draw, within = random.Random(0), 0
    for _ in range(DEVICES):
        truth = straight(draw)
        found, errors = fitted(SIZES, *noisy(truth, 0.1, draw))
        near = (
            abs(own - truth(batch)) <= error
            for batch, own, error in zip(SIZES, found, errors, strict=True)
        )
        within += sum(near)
    assert 0.55 < within / (DEVICES * len(SIZES)) < 0.8


@pytest.mark.parametrize(
    ("batches", "values", "errors"),
    [
        ((1, 2), (1.0, 1.5), (0.5, 0.5)),
        ((1, 2, 4), (1.0, 2.1, 4.0), (0.1, 0.0, 0.1)),
        ((1, 2, 3), (3.0, 2.0, 1.0), (1.0,) * 3),
    ],
    ids=["two points", "unknown error", "falls"],
)
def test_points_without_a_line_are_unchanged(batches, values, errors):
    assert fitted(batches, values, errors) == (list(values), list(errors))


# Repeated measurements


def test_usual_value_counts_disturbances_but_no_outlier():
    quiet = [1.0, 1.02, 0.98, 1.01, 0.99] * 4
    assert usual_value(quiet) == pytest.approx(1.0)
    assert 1.0 < usual_value([*quiet, 50.0]) < 1.01
    assert usual_value([2.0]) == 2.0


def test_few_samples_count_less_than_what_is_usual():
    assert deviation([1.0, 1.0], usual=0.1) > 0.05
    assert deviation([1.0, 1.0] * 100, usual=0.1) < 0.02
    assert deviation([0.9, 1.1] * 100, usual=0.01) == pytest.approx(
        deviation([0.9, 1.1] * 100), 0.05
    )
