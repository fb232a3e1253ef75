"""Monotone curves through measured points, and straightening of noisy lines."""

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

from poplar.values.curve import MonotoneCurve, pooled, straightened

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


points = st.lists(
    st.tuples(st.integers(1, 100), st.floats(1e-6, 10.0)),
    min_size=1,
    max_size=7,
    unique_by=lambda point: point[0],
).map(sorted)


@given(points)
def test_curve_is_monotone_and_finite_up_to_its_last_point(drawn):
    batches, seen = zip(*drawn, strict=True)
    curve = MonotoneCurve(batches, tuple(pooled(seen)))
    values = [curve.at(batch) for batch in range(batches[-1] + 1)]
    assert values[0] == 0.0
    assert all(low <= high * (1 + 1e-9) < math.inf for low, high in pairwise(values))
    assert curve.at(batches[-1] + 1) == math.inf


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


# Straight lines with noise


SIZES = (1, 2, 4, 8, 16)


def noisy(truth: Seconds, noise: float, draw: random.Random) -> tuple[list[float], list[float]]:
    values = [truth(batch) * (1.0 + noise * draw.gauss(0.0, 1.0)) for batch in SIZES]
    return values, [noise * value for value in values]


def test_straightening_a_noisy_line_reduces_its_errors():
    draw, gains, left = random.Random(0), [], 0
    for _ in range(DEVICES):
        truth = straight(draw)
        values, errors = noisy(truth, 0.04, draw)
        line = straightened(SIZES, values, errors)
        left += line == values
        gains += [
            (abs(after - truth(batch)), abs(before - truth(batch)))
            for batch, after, before in zip(SIZES, line, values, strict=True)
        ]
    assert left < DEVICES / 4, "most lines are recognized"
    assert sum(after for after, _ in gains) < 0.8 * sum(before for _, before in gains)


@pytest.mark.parametrize("shape", [flat_then_straight, tiled])
def test_curves_that_are_not_lines_are_unchanged(shape: Callable[[random.Random], Seconds]):
    draw = random.Random(1)
    for _ in range(DEVICES):
        truth = shape(draw)
        values, errors = noisy(truth, 0.002, draw)
        for batch, value in zip(SIZES, straightened(SIZES, values, errors), strict=True):
            assert value == pytest.approx(truth(batch), rel=0.012)


@pytest.mark.parametrize(
    ("batches", "values", "errors"),
    [
        ((1, 2), (1.0, 1.5), (0.5, 0.5)),
        ((1, 2, 4), (1.0, 2.1, 4.0), (0.1, 0.0, 0.1)),
        ((1, 2, 3), (3.0, 2.0, 1.0), (1.0,) * 3),
        ((1, 2, 3), (0.1, 2.0, 5.0), (1.0,) * 3),
    ],
    ids=["two points", "unknown error", "falls", "negative intercept"],
)
def test_points_without_a_line_are_unchanged(batches, values, errors):
    assert straightened(batches, values, errors) == list(values)
