"""Arithmetic on points of measured curves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from records import cluster

from poplar.profiler.batch_curves import at_speed_of, smoothed, times_to_be_sure, with_measured
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
    found = smoothed(measured)
    growth = [
        (after.seconds - before.seconds) / (after.batch - before.batch)
        for before, after in pairwise(found)
    ]
    assert growth == pytest.approx([growth[0]] * 3, rel=0.1)
    assert [p.activation_bytes for p in found] == [1, 2, 4, 8]
    assert all(
        new.spread_seconds < old.spread_seconds for new, old in zip(found, measured, strict=True)
    )


def test_steps_stay():
    steps = [point(batch, 8.0 + (batch > 4), 0.01) for batch in (1, 2, 4, 8)]
    for new, old in zip(smoothed(steps), steps, strict=True):
        assert new.seconds == pytest.approx(old.seconds, rel=1e-3)


@pytest.mark.parametrize(("spread", "expected"), [(0.0, 30.0), (1e-3, 30.0), (1e3, 26.0)])
def test_noisy_new_point_stays_on_the_curve(spread, expected):
    """Between 20 s and 32 s at batches of 4 and 8 there may be a step, but it must be proven."""
    profile = cluster((1.0,), ["cpu"])
    known = replace(profile.devices[0], points=(point(4, 20.0), point(8, 32.0)))
    profile = replace(profile, devices=(known,))
    (device,) = with_measured(profile, [[point(6, 30.0, spread)]]).devices
    assert device.seconds(6) == pytest.approx(expected, rel=1e-3)


def test_measured_points_are_inserted_in_order_and_replace_points_of_the_same_batch():
    profile = cluster((10.0, 5.0), ["cpu"] * 2)
    first = profile.devices[0].points
    again, new = point(first[0].batch, 9.0), point(first[-1].batch + 1, 99.0)
    merged = with_measured(profile, [[new, again], []])
    assert merged.devices[0].points == (again, *first[1:], new)
    assert merged.devices[1] == profile.devices[1]
