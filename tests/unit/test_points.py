"""Arithmetic on points of measured curves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from records import cluster

from poplar.profiler.batch_curves import at_speed_of, on_a_line, times_to_be_sure, with_measured
from poplar.values.profile import BatchPoint


def point(batch: int, seconds: float, spread: float = 0.0) -> BatchPoint:
    return BatchPoint(batch=batch, seconds=seconds, activation_bytes=batch, spread_seconds=spread)


def test_new_point_is_scaled_to_the_speed_of_the_reference():
    known, again, new = point(4, 1.0), point(4, 1.25), point(6, 1.875, 0.01875)
    assert at_speed_of(known, new, again) == point(6, 1.5, 0.015)


def test_scaling_a_point_scales_its_error():
    assert point(4, 1.0, 0.25).times(3.0) == point(4, 3.0, 0.75)


def test_more_samples_are_needed_for_uncertain_medians():
    sure, unsure = [point(1, 1.0, 0.005)], [point(1, 1.0, 0.005), point(2, 2.0, 0.06)]
    assert times_to_be_sure([sure, sure]) == 1.0
    assert times_to_be_sure([sure, unsure]) == pytest.approx(9.0), "3 % where 1 % is wanted"


def test_noisy_points_move_onto_a_line():
    measured = [point(1, 1.1, 0.1), point(2, 1.9, 0.1), point(4, 4.2, 0.2), point(8, 7.8, 0.4)]
    found = on_a_line(measured)
    growth = [
        (after.seconds - before.seconds) / (after.batch - before.batch)
        for before, after in pairwise(found)
    ]
    assert growth == pytest.approx([growth[0]] * 3)
    assert [p.activation_bytes for p in found] == [1, 2, 4, 8]
    assert [p.spread_seconds for p in found] == [p.spread_seconds for p in measured]


def test_steps_are_not_straightened():
    steps = [point(batch, 8.0 + (batch > 4), 0.01) for batch in (1, 2, 4, 8)]
    assert on_a_line(steps) == steps


def test_measured_points_are_inserted_in_order_and_replace_points_of_the_same_batch():
    profile = cluster((10.0, 5.0), ["cpu"] * 2)
    first = profile.devices[0].points
    again, new = point(first[0].batch, 9.0), point(first[-1].batch + 1, 99.0)
    merged = with_measured(profile, [[new, again], []])
    assert merged.devices[0].points == (again, *first[1:], new)
    assert merged.devices[1] == profile.devices[1]
