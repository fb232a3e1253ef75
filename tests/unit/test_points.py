"""Points of curves: how sure they are, and how those of different moments become one curve."""

from __future__ import annotations

from itertools import pairwise

import pytest

from poplar.profile import BatchPoint
from poplar.profiler.points import at_speed_of, on_a_line, times_to_be_sure


def point(batch: int, seconds: float, spread: float = 0.0) -> BatchPoint:
    return BatchPoint(batch=batch, seconds=seconds, activation_bytes=batch, spread_seconds=spread)


def test_a_device_that_became_slower_has_no_step_in_its_curve():
    known, again, new = point(4, 1.0), point(4, 1.25), point(6, 1.875, 0.01875)
    assert at_speed_of(known, new, again) == point(6, 1.5, 0.015)


def test_on_a_slower_device_errors_are_larger_as_well():
    assert point(4, 1.0, 0.25).times(3.0) == point(4, 3.0, 0.75)


def test_a_median_that_is_sure_enough_needs_no_more_samples():
    sure, unsure = [point(1, 1.0, 0.005)], [point(1, 1.0, 0.005), point(2, 2.0, 0.06)]
    assert times_to_be_sure([sure, sure]) == 1.0
    assert times_to_be_sure([sure, unsure]) == pytest.approx(9.0), "of 3 %, where 1 % is wanted"


def test_noise_is_taken_off_a_line_and_memory_is_left_alone():
    measured = [point(1, 1.1, 0.1), point(2, 1.9, 0.1), point(4, 4.2, 0.2), point(8, 7.8, 0.4)]
    found = on_a_line(measured)
    growth = [
        (after.seconds - before.seconds) / (after.batch - before.batch)
        for before, after in pairwise(found)
    ]
    assert growth == pytest.approx([growth[0]] * 3)
    assert [p.activation_bytes for p in found] == [1, 2, 4, 8]
    assert [p.spread_seconds for p in found] == [p.spread_seconds for p in measured]


def test_what_noise_does_not_explain_stays():
    steps = tuple(point(batch, 8.0 + (batch > 4), 0.01) for batch in (1, 2, 4, 8))
    assert on_a_line(steps) == steps
