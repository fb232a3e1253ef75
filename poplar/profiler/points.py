"""Arithmetic on points of measured curves: their accuracy, and adding points measured later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from poplar.curve import straightened
from poplar.profile import BatchPoint, ClusterProfile

SURE = 0.01
"""Relative standard error of a median above which more passes are timed, within the budget."""


def times_to_be_sure(curves: Iterable[Sequence[BatchPoint]]) -> float:
    """By which factor to increase the samples so that every median is `SURE`; at least 1."""
    unsure = max(point.spread_seconds / point.seconds for own in curves for point in own)
    return float(max(1.0, (unsure / SURE) ** 2))


def on_a_line(points: Sequence[BatchPoint]) -> tuple[BatchPoint, ...]:
    """The points, moved onto a straight line if noise explains their distance to it."""
    line = straightened(
        [point.batch for point in points],
        [point.seconds for point in points],
        [point.spread_seconds for point in points],
    )
    return tuple(replace(point, seconds=value) for point, value in zip(points, line, strict=True))


def at_speed_of(known: BatchPoint, new: BatchPoint, again: BatchPoint) -> BatchPoint:
    """Scale a new point by the change of speed between `known` and `again`, the same batch."""
    factor = known.seconds / again.seconds
    spread = math.hypot(new.spread_seconds / new.seconds, again.spread_seconds / again.seconds)
    seconds = factor * new.seconds
    return replace(new, seconds=seconds, spread_seconds=spread * seconds)


def with_measured(
    profile: ClusterProfile, points: Sequence[Sequence[BatchPoint]]
) -> ClusterProfile:
    """The profile with more points, by rank. They replace points of the same batch."""
    devices = []
    for device, new in zip(profile.devices, points, strict=True):
        merged = {point.batch: point for point in (*device.points, *new)}
        ordered = tuple(merged[batch] for batch in sorted(merged))
        devices.append(replace(device, points=ordered))
    return replace(profile, devices=tuple(devices))
