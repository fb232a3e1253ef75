"""Curves of a device that recomputes some units of the model in the backward.

Passes are measured with no unit and with all units recomputed. In between, seconds are linear in
the recomputed part of the model, counted in parameters, and so are bytes up to the last unit. That
one differs: its activations are needed at the beginning of the backward, when those of all others
are kept, whether it is recomputed or not. So recomputing it saves less, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile


def recomputed_part(model: ModelProfile, units: Collection[int]) -> float:
    """These units as a part of all that can be recomputed, by parameters; 1 for all of them."""
    numels = model.unit_numels
    every = sum(numels[unit] for unit in model.recomputable_units)
    return sum(numels[unit] for unit in units) / every if units else 0.0


def saved_part(model: ModelProfile, units: Collection[int]) -> float:
    """What these units save, as a part of the bytes that recomputing all units saves."""
    *others, last = model.recomputable_units
    before = recomputed_part(model, others)
    saved = model.saved_without_last_unit
    if saved is None or not others:
        saved = before
    own = recomputed_part(model, set(units) - {last})
    return (saved * own / before if own else 0.0) + (1.0 - saved if last in units else 0.0)


def parts_of(model: ModelProfile, units: Collection[int]) -> tuple[float, float]:
    """The parts of `recomputing` for these units; both are 0 for none."""
    return (recomputed_part(model, units), saved_part(model, units)) if units else (0.0, 0.0)


def with_recomputed_parts(
    cluster: ClusterProfile, parts: Sequence[tuple[float, float]]
) -> ClusterProfile:
    """The cluster with devices that compute a part of the model again, and save a part of what
    recomputing all units saves.
    """
    devices = tuple(
        recomputing(device, *both) if device.recomputed_points else device
        for device, both in zip(cluster.devices, parts, strict=True)
    )
    return replace(cluster, devices=devices)


@lru_cache(1024)
def recomputing(device: DeviceProfile, again: float, saved: float) -> DeviceProfile:
    """The device with the curves of passes that recompute units.

    Args:
        device: with `recomputed_points`, unless both parts are 0.
        again: the part of the model that is computed again.
        saved: the part of the bytes that recomputing all units saves.
    """
    if again == saved == 0.0:
        return replace(device, recomputed_points=())
    fully = replace(device, points=device.recomputed_points, recomputed_points=())
    plain_seconds = extended(device, device.seconds)
    plain_bytes = extended(device, device.activation_bytes)
    # Only passes without recomputation are known above the largest one with it.
    largest = fully.max_batch if again > 0.0 else max(device.max_batch, fully.max_batch)
    batches = {point.batch for point in (*device.points, *device.recomputed_points)}
    batches.add(fully.max_batch + 1)
    # Below its first point a curve is no straight line.
    batches.update(range(1, max(device.points[0].batch, fully.points[0].batch)))

    def point(batch: int) -> BatchPoint:
        seconds, held = plain_seconds(batch), plain_bytes(batch)
        if batch <= fully.max_batch:
            seconds += again * max(0.0, fully.seconds(batch) - seconds)
            held -= saved * max(0.0, held - fully.activation_bytes(batch))
        return BatchPoint(batch=batch, seconds=seconds, activation_bytes=math.ceil(held))

    points = tuple(point(batch) for batch in sorted(batches) if batch <= largest)
    return replace(device, points=points, recomputed_points=())


def extended(device: DeviceProfile, curve: Callable[[int], float]) -> Callable[[int], float]:
    """The curve, continued past its last point by a line that is as steep as any of its ends."""
    first, last = device.points[0].batch, device.max_batch
    slope = curve(last) / last
    if len(device.points) > 1:
        before = device.points[-2].batch
        whole = (curve(last) - curve(first)) / (last - first)
        slope = max(whole, (curve(last) - curve(before)) / (last - before))
    return lambda batch: curve(min(batch, last)) + slope * max(0, batch - last)
