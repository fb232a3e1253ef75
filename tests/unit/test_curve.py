"""Through a few points a curve never falls, and says between which values the truth lies.

Devices here are functions of the batch, measured at powers of two with noise; how often the truth
lies within the interval, and how wide that is, is counted over many of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.curve import MonotoneCurve, pooled, straightened
from poplar.hardware.published_measurements import CURVES
from poplar.profile import BatchPoint, DeviceProfile

NOISE = 0.004
"""Standard error of a median, as a part of it."""
DEVICES = 80

Seconds = Callable[[int], float]


def straight(draw: random.Random) -> Seconds:
    latency = draw.choice((0.0, 1.0, 4.0, 16.0, 40.0))
    return lambda batch: latency + batch


def bent(draw: random.Random) -> Seconds:
    power, latency = draw.uniform(0.7, 1.4), draw.choice((0.0, 2.0, 8.0))
    return lambda batch: latency + batch**power


def flat_then_straight(draw: random.Random) -> Seconds:
    full, latency = draw.randint(2, 20), draw.choice((0.0, 2.0))
    return lambda batch: latency + max(full, batch)


def tiled(draw: random.Random) -> Seconds:
    tile, latency = draw.choice((2, 3, 4, 6, 8, 12, 16)), draw.choice((0.0, 2.0, 8.0))
    return lambda batch: latency + math.ceil(batch / tile) * tile


def partly_tiled(draw: random.Random) -> Seconds:
    tile, part = draw.choice((2, 4, 8, 16)), draw.random()
    latency = draw.choice((0.0, 2.0, 8.0))
    return lambda batch: latency + part * math.ceil(batch / tile) * tile + (1 - part) * batch


def in_waves(draw: random.Random) -> Seconds:
    wave, latency = draw.uniform(2.0, 16.0), draw.choice((0.0, 2.0, 8.0))
    return lambda batch: latency + math.ceil(batch / wave) * wave


class Counted(NamedTuple):
    within: float
    """Part of all batches whose true value lies in the interval."""
    width: float
    """Median width at batches that were not measured, as a part of the true value."""


def counted(kind: Callable[[random.Random], Seconds], noise: float = NOISE) -> Counted:
    draw, inside, widths = random.Random(0), [], []
    for _ in range(DEVICES):
        true, largest = kind(draw), draw.choice((16, 20, 32, 48, 64))
        curve = measured(draw, true, largest, noise)
        for batch in range(1, largest + 1):
            low, high = curve.within(batch)
            inside.append(low * (1 - 1e-9) <= true(batch) <= high * (1 + 1e-9))
            if batch not in curve.batches:
                widths.append((high - low) / true(batch))
    return Counted(sum(inside) / len(inside), median(widths))


def measured(draw: random.Random, true: Seconds, largest: int, noise: float) -> MonotoneCurve:
    batches = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    seen = [true(batch) * draw.gauss(1.0, noise) for batch in batches]
    values = pooled(seen)
    errors = (max(noise * v, abs(v - s)) for v, s in zip(values, seen, strict=True))
    return MonotoneCurve(tuple(batches), tuple(values), tuple(errors))


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (straight, 0.97),
        (bent, 0.97),
        (flat_then_straight, 0.93),
        (tiled, 0.94),
        (partly_tiled, 0.92),
        (in_waves, 0.92),
    ],
)
def test_the_truth_lies_within_the_interval_in_nearly_all_cases(kind, least):
    assert counted(kind).within >= least


def test_the_interval_is_narrow_where_points_lie_on_a_line():
    assert counted(straight, noise=0.0).width <= 0.03
    assert counted(straight).width <= 0.06
    assert counted(straight, noise=0.01).width <= 0.12


def test_it_is_much_narrower_than_the_values_of_the_neighbours():
    """Which are a factor of two apart at least half of the time."""
    assert counted(bent).width < 0.1
    assert counted(tiled).width < 0.15


def test_points_at_powers_of_two_leave_steps_open_and_one_more_decides():
    """Steps of 8, or flat up to 8 and straight beyond: 18 samples cost as 18 or as 24."""
    batches, seconds = (1, 2, 4, 8, 16, 32), (8.0, 8.0, 8.0, 8.0, 16.0, 32.0)
    unknown = MonotoneCurve(batches, seconds)
    assert unknown.within(18) == pytest.approx((16.0, 24.0))
    assert unknown.within(24) == pytest.approx((24.0, 24.0))  # both say that
    line = MonotoneCurve((*batches[:-1], 20, 32), (*seconds[:-1], 20.0, 32.0))
    assert line.within(18)[1] <= 20.0
    steps = MonotoneCurve((*batches[:-1], 20, 32), (*seconds[:-1], 24.0, 32.0))
    assert steps.within(22)[0] >= 24.0


def test_a_curve_that_bends_one_way_is_held():
    batches = (1, 4, 8, 16, 24)
    convex = MonotoneCurve(batches, tuple(batch**1.5 for batch in batches))
    concave = MonotoneCurve(batches, tuple(batch**0.5 for batch in batches))
    for batch in range(4, 25):
        for curve, true in ((convex, batch**1.5), (concave, batch**0.5)):
            low, high = curve.within(batch)
            assert low * (1 - 1e-9) <= true <= high * (1 + 1e-9)


def test_two_points_say_little_more_than_that_the_curve_does_not_fall():
    low, high = MonotoneCurve((1, 64), (1.0, 64.0)).within(33)
    assert low == 1.0
    assert high == 64.0


def test_at_a_point_it_is_as_sure_as_its_repetitions():
    curve = MonotoneCurve((2, 4, 8), (1.0, 2.0, 3.0), (0.0, 0.1, 0.0))
    assert curve.within(4) == pytest.approx((1.8, 2.2))
    assert curve.within(8) == (3.0, 3.0)


def test_below_the_first_point_it_lies_between_proportion_and_that_point():
    curve = MonotoneCurve((4, 8), (4.0, 6.0))
    assert curve.within(2) == (2.0, 4.0)
    assert MonotoneCurve((4,), (4.0,)).within(1) == (1.0, 4.0)


def test_nothing_is_said_of_no_samples_and_beyond_the_last_point():
    curve = MonotoneCurve((4, 8), (4.0, 6.0))
    assert curve.within(0) == (0.0, 0.0)
    assert curve.within(9) == (math.inf, math.inf)


points = st.lists(
    st.tuples(st.integers(1, 100), st.floats(1e-6, 10.0), st.floats(0.0, 1.0)),
    min_size=1,
    max_size=7,
    unique_by=lambda point: point[0],
).map(sorted)


@given(points)
def test_whatever_was_measured_the_interval_holds_the_curve_and_is_finite(drawn):
    batches, seen, errors = zip(*drawn, strict=True)
    curve = MonotoneCurve(batches, tuple(pooled(seen)), errors)
    for batch in range(1, batches[-1] + 1):
        low, high = curve.within(batch)
        assert 0.0 <= low <= curve.at(batch) <= high < math.inf


@given(st.lists(st.floats(0.0, 10.0), max_size=8))
def test_pooled_values_never_fall_and_keep_their_sum(values):
    found = pooled(values)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))


@pytest.mark.parametrize("real", CURVES, ids=lambda curve: f"{curve.model} on {curve.gpu}")
def test_published_curves_lie_within_what_their_other_points_say(real):
    """Each point but the ends left out in turn: near-affine, as its authors measured it."""
    seconds = real.seconds
    for left_out in sorted(seconds)[1:-1]:
        others = {batch: took for batch, took in seconds.items() if batch != left_out}
        curve = MonotoneCurve(tuple(others), tuple(others.values()), (0.01,) * len(others))
        low, high = curve.within(left_out)
        assert 0.97 * low <= seconds[left_out] <= 1.03 * high


def test_a_device_is_as_unsure_of_points_that_noise_put_out_of_order_as_they_are():
    device = DeviceProfile(
        name="a device",
        memory_bytes=10**9,
        optimizer_seconds=0.1,
        points=tuple(
            BatchPoint(batch=batch, seconds=seconds, activation_bytes=0, spread_seconds=0.01)
            for batch, seconds in ((1, 1.0), (2, 3.0), (4, 2.0))
        ),
    )
    low, high = device.seconds_within(2)
    assert low <= 2.0
    assert high >= 3.0
    assert device.seconds_within(1) == pytest.approx((0.98, 1.02))


# On a line but for noise


RUNGS = (1, 2, 4, 8, 16)


def noisy(truth: Seconds, noise: float, draw: random.Random) -> tuple[list[float], list[float]]:
    values = [truth(batch) * (1.0 + noise * draw.gauss(0.0, 1.0)) for batch in RUNGS]
    return values, [noise * value for value in values]


def test_what_lies_on_a_line_but_for_noise_comes_nearer_to_it():
    draw, gains, left = random.Random(0), [], 0
    for _ in range(DEVICES):
        truth = straight(draw)
        values, errors = noisy(truth, 0.04, draw)
        line = straightened(RUNGS, values, errors)
        left += line == values
        gains += [
            (abs(after - truth(batch)), abs(before - truth(batch)))
            for batch, after, before in zip(RUNGS, line, values, strict=True)
        ]
    assert left < DEVICES / 4, "few lines are taken for something else"
    assert sum(after for after, _ in gains) < 0.8 * sum(before for _, before in gains)


@pytest.mark.parametrize("shape", [flat_then_straight, tiled])
def test_what_is_no_line_stays_as_it_was_measured(shape: Callable[[random.Random], Seconds]):
    draw = random.Random(1)
    for _ in range(DEVICES):
        truth = shape(draw)
        values, errors = noisy(truth, 0.002, draw)
        for batch, value in zip(RUNGS, straightened(RUNGS, values, errors), strict=True):
            assert value == pytest.approx(truth(batch), rel=0.012)


@pytest.mark.parametrize("shape", [straight, bent, flat_then_straight, tiled])
def test_where_noise_hides_a_shape_it_remains_possible(shape: Callable[[random.Random], Seconds]):
    draw, within = random.Random(2), []
    for _ in range(DEVICES):
        truth = shape(draw)
        values, errors = noisy(truth, 0.08, draw)
        line = pooled(straightened(RUNGS, values, errors))
        curve = MonotoneCurve(RUNGS, tuple(line), tuple(errors))
        for batch in range(1, RUNGS[-1] + 1):
            low, high = curve.within(batch)
            within.append(low <= truth(batch) <= high)
    assert sum(within) > 0.9 * len(within)


@pytest.mark.parametrize(
    ("batches", "values", "errors"),
    [
        ((1, 2), (1.0, 1.5), (0.5, 0.5)),
        ((1, 2, 4), (1.0, 2.1, 4.0), (0.1, 0.0, 0.1)),
        ((1, 2, 3), (3.0, 2.0, 1.0), (1.0,) * 3),
        ((1, 2, 3), (0.1, 2.0, 5.0), (1.0,) * 3),
    ],
    ids=["two points", "an error that is not known", "falls", "starts below nothing"],
)
def test_points_that_say_nothing_of_a_line_stay(batches, values, errors):
    assert straightened(batches, values, errors) == list(values)
