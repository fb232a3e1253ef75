"""Points of measured curves: how sure they are, and how new ones come in beside old ones.

Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from poplar.curve import straightened
from poplar.profile import BatchPoint, ClusterProfile

SURE = 0.01
"""Of a median, as a fraction: where it is less sure, more is timed, as far as the budget goes."""


def times_to_be_sure(curves: Iterable[Sequence[BatchPoint]]) -> float:
    """How many times as many samples would make every median `SURE`; at least 1."""
    unsure = max(point.spread_seconds / point.seconds for own in curves for point in own)
    return float(max(1.0, (unsure / SURE) ** 2))


def on_a_line(points: Sequence[BatchPoint]) -> tuple[BatchPoint, ...]:
    """Points on a straight line where only noise keeps them off it."""
    line = straightened(
        [point.batch for point in points],
        [point.seconds for point in points],
        [point.spread_seconds for point in points],
    )
    return tuple(replace(point, seconds=value) for point, value in zip(points, line, strict=True))


def at_speed_of(known: BatchPoint, new: BatchPoint, again: BatchPoint) -> BatchPoint:
    """A new point as it would have been when the known one was measured, which now took `again`."""
    factor = known.seconds / again.seconds
    spread = math.hypot(new.spread_seconds / new.seconds, again.spread_seconds / again.seconds)
    seconds = factor * new.seconds
    return replace(new, seconds=seconds, spread_seconds=spread * seconds)


def with_measured(profile: ClusterProfile, points: Sequence[BatchPoint | None]) -> ClusterProfile:
    """The profile with one more point for each rank that has one."""
    devices_ = tuple(
        device if point is None else replace(device, points=_inserted(device.points, point))
        for device, point in zip(profile.devices, points, strict=True)
    )
    return replace(profile, devices=devices_)


def _inserted(points: Sequence[BatchPoint], point: BatchPoint) -> tuple[BatchPoint, ...]:
    others = [other for other in points if other.batch != point.batch]
    return tuple(sorted([*others, point], key=lambda other: other.batch))
