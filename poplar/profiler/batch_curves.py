"""Time and memory of passes against the batch, measured on all ranks at once.

Ranks measure together for equally long, so a core, a memory bus or a power budget that they share
is shared as in training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from poplar.profiler.batch_sizes import (
    NEAR_ENOUGH,
    Samples,
    SizeLimits,
    climb,
    largest_on_a_line,
    probe,
    time_sizes,
)
from poplar.profiler.engine_passes import EnginePasses, sharded_passes
from poplar.profiler.model_profile import trained_units
from poplar.profiler.passes import Passes, PassParts
from poplar.profiler.progress import Report
from poplar.profiler.session import Session
from poplar.system import devices
from poplar.values.curve import fitted
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile

TIMES_EACH = 5
"""Passes of a size that are timed, if all sizes take equally long."""
TIMING = 0.35
"""Part of the time budget for timing passes; as much again if some run on the engine."""
SURE = 0.01
"""Relative standard error of a median above which more passes are timed, within the budget."""


@dataclass(frozen=True)
class BatchCurve:
    """Measured passes of one rank."""

    points: Sequence[BatchPoint]
    parts: PassParts
    """How a pass of a middle size is spent."""
    throttled: str
    """Why the device ran below its clocks; empty if it did not."""
    largest_unsharded: int = 0
    """The largest batch of plain passes; 0 if there were none."""


def measure_curves(session: Session, report: Report) -> tuple[list[BatchCurve], float]:
    """Measure the curve of every rank, with more passes if they differ much. Collective.

    Plain passes as far as all ranks have memory for the whole model. Where larger batches fit only
    beside a shard of it, or no batch fits otherwise, passes run on the engine at stage 3.

    Returns:
        Curves by rank, and the noise: how many times as many samples were needed to be sure of a
        median, 1 on a quiet machine.
    """
    curves: list[BatchCurve] = []
    noise = 1.0
    if session.plain_passes_fit():
        curves, noise = _plain_curves(session, report)
        if curves and not _may_grow(session, curves):
            return _smoothed(curves), noise
    with sharded_passes(session) as passes:
        more, noise_of_more = _engine_curves(session, passes, curves, report)
    if curves:
        return _smoothed(map(_extended, curves, more)), max(noise, noise_of_more)
    return _smoothed(more), noise_of_more


def _plain_curves(session: Session, report: Report) -> tuple[list[BatchCurve], float]:
    """Curves of plain passes; empty if one sample does not fit beside the whole model."""
    passes = session.passes(trained_units(session))
    with session.as_in_training():
        report("a first pass")
        if not session.fits_on_all_ranks(passes.check, "the profiler's first pass"):
            return [], 1.0
        climbing = climb(passes, SizeLimits.of(session, sharded=False))
        curves, noise = _measured(session, passes, climbing, report)
    return [replace(each, largest_unsharded=each.points[-1].batch) for each in curves], noise


def _engine_curves(
    session: Session, passes: EnginePasses, known: Sequence[BatchCurve], report: Report
) -> tuple[list[BatchCurve], float]:
    """Curves of passes on the engine, each from the last of the known points on."""
    report("passes with sharded parameters")
    session.on_all_ranks(lambda: passes.together(passes.check), "the profiler's first pass")
    points = known[session.group.rank].points if known else ()
    probing = probe(passes, SizeLimits.of(session, sharded=True), known=points)
    return _measured(session, passes, probing, report)


def _measured(
    session: Session, passes: Passes, trying: Iterator[list[BatchPoint]], report: Report
) -> tuple[list[BatchCurve], float]:
    """Memory of the sizes that are tried, then their times."""
    budget, own = session.job.profile_seconds, session.group.rank
    report("memory against batch")
    by_rank = tried_sizes(session, passes, trying, "measuring memory")
    samples: Samples = defaultdict(list)

    def time_passes(seconds: float) -> BatchCurve:
        hot_before = devices.throttle_reason(session.device)
        points = time_sizes(passes, by_rank[own], seconds=seconds, least=2, samples=samples)
        return BatchCurve(
            points=points,
            parts=passes.parts(points[len(points) // 2].batch),
            throttled=devices.throttle_reason(session.device) or hot_before,
        )

    def timed(seconds: float) -> list[BatchCurve]:
        return session.on_all_ranks(
            lambda: passes.together(lambda: time_passes(seconds)), "timing passes"
        )

    first = min(TIMES_EACH * _longest(by_rank), budget * TIMING)
    report(f"time against batch, {first:.0f} s")
    curves = timed(first)
    if any(curve.throttled for curve in curves):
        report(f"time against batch, {first:.0f} s again: a device may have cooled down")
        samples.clear()
        curves = timed(first)
    noise = times_to_be_sure(curve.points for curve in curves)
    more = min((noise - 1.0) * first, budget * TIMING - first)
    if more > 0.0:
        report(f"time against batch, {more:.0f} s more: repeated passes differ")
        curves = timed(more)
    return curves, noise


def tried_sizes(
    session: Session, passes: Passes, trying: Iterator[list[BatchPoint]], doing: str
) -> list[list[BatchPoint]]:
    """First passes of the sizes that `climb` or `probe` tries, by rank. Collective."""
    by_rank: list[list[BatchPoint]] = [[]] * session.group.size

    def try_next() -> list[BatchPoint]:
        return passes.together(lambda: next(trying, []))

    # One size at a time, so that no rank waits for several compilations of another one at once.
    while any(tried := session.on_all_ranks(try_next, doing)):
        by_rank = [now or before for now, before in zip(tried, by_rank, strict=True)]
    return by_rank


def _may_grow(session: Session, curves: Sequence[BatchCurve]) -> bool:
    """Whether a rank has memory and time for larger batches if parameters are sharded. Collective.

    Without larger batches on any rank, passes on the engine would show nothing new.
    """
    points = curves[session.group.rank].points
    last = points[-1]

    def largest(*, sharded: bool) -> int:
        limits = SizeLimits.of(session, sharded=sharded)
        in_time = min(limits.max_batch, last.batch * limits.longest_seconds / last.seconds)
        if len(points) == 1:
            return int(in_time)
        return int(min(in_time, largest_on_a_line(points, limits.activation_bytes)))

    # If time ends both, plain passes have shown as much.
    has_memory = len(points) == 1 or largest(sharded=True) > largest(sharded=False)
    grows = largest(sharded=True) > last.batch * (1 + NEAR_ENOUGH)
    return any(session.exchange(session.group.size > 1 and has_memory and grows))


def _extended(curve: BatchCurve, more: BatchCurve) -> BatchCurve:
    """The curve with larger batches, measured on the engine after the curve's last one.

    What the engine adds to every pass is the difference at the batch that was measured both ways.
    """
    known, (again, *larger) = curve.points[-1], more.points
    added = again.seconds - known.seconds
    points = [replace(point, seconds=max(point.seconds - added, known.seconds)) for point in larger]
    return replace(
        curve, points=[*curve.points, *points], throttled=curve.throttled or more.throttled
    )


def _smoothed(curves: Iterable[BatchCurve]) -> list[BatchCurve]:
    return [replace(curve, points=smoothed(curve.points)) for curve in curves]


def measure_points(
    session: Session, batches: Sequence[Sequence[int]], references: Sequence[BatchPoint]
) -> list[list[BatchPoint]]:
    """Measure more batches, relative to a point of each rank's curve. Collective.

    The reference is measured again in turns with the new batches, and new points are scaled to the
    speed at which it was measured first: a device may be a few percent faster or slower by now,
    which must not look like a step in its curve.

    Args:
        batches: by rank, sizes to measure; may be empty.
        references: by rank, a point of its curve.
    """
    wanted = [[*own, known.batch] for own, known in zip(batches, references, strict=True)]
    sizes = wanted[session.group.rank]
    with _passes_for(session, wanted) as passes:
        measured = _timed(
            session, passes, lambda: list(map(passes.first, sizes)), 0.0, least=TIMES_EACH
        )
    return [
        [at_speed_of(known, point, again) for point in points]
        for known, (*points, again) in zip(references, measured, strict=True)
    ]


def time_again(
    session: Session, known: Sequence[BatchPoint], *, seconds: float
) -> list[BatchPoint]:
    """Time a batch of each rank, whose memory is known, at the present speed. Collective.

    Args:
        known: by rank, the batch as it was measured before.
        seconds: time at least so long, and each batch at least twice.
    """
    own = known[session.group.rank]
    with _passes_for(session, [[point.batch] for point in known]) as passes:

        def settled() -> list[BatchPoint]:
            return [replace(own, seconds=passes.settled_seconds(own.batch))]

        return [now for (now,) in _timed(session, passes, settled, seconds, least=2)]


def _timed(
    session: Session,
    passes: Passes,
    first: Callable[[], list[BatchPoint]],
    seconds: float,
    least: int,
) -> list[list[BatchPoint]]:
    """Time the sizes that `first` has run, `least` times each and at least so long. Collective."""
    by_rank = session.on_all_ranks(
        lambda: passes.together(first), "the first passes of batch sizes"
    )
    sizes, seconds = by_rank[session.group.rank], max(seconds, least * _longest(by_rank))
    time_all = partial(time_sizes, passes, sizes, seconds=seconds, least=least)
    return session.on_all_ranks(lambda: passes.together(time_all), "timing passes")


@contextmanager
def _passes_for(session: Session, batches: Sequence[Sequence[int]]) -> Iterator[Passes]:
    """Plain passes if these batches, by rank, fit beside all parameters. Collective."""
    if session.plain_passes_fit(list(map(max, batches))):
        with session.as_in_training():
            yield session.passes(trained_units(session))
    else:
        with sharded_passes(session) as passes:
            yield passes


def _longest(by_rank: Iterable[Iterable[BatchPoint]]) -> float:
    """Seconds of one pass of each size, on the slowest rank."""
    return max(sum(size.seconds for size in own) for own in by_rank)


def times_to_be_sure(curves: Iterable[Sequence[BatchPoint]]) -> float:
    """The factor of samples with which every median would be `SURE`; at least 1."""
    unsure = max(point.spread_seconds / point.seconds for own in curves for point in own)
    return float(max(1.0, (unsure / SURE) ** 2))


def smoothed(points: Sequence[BatchPoint]) -> list[BatchPoint]:
    """The points on the curve that all of them show together: see `fitted`."""
    values, errors = fitted(
        [point.batch for point in points],
        [point.seconds for point in points],
        [point.spread_seconds for point in points],
    )
    return [
        replace(point, seconds=value, spread_seconds=error)
        for point, value, error in zip(points, values, errors, strict=True)
    ]


def at_speed_of(known: BatchPoint, new: BatchPoint, again: BatchPoint) -> BatchPoint:
    """Scale a new point by the change of speed between `known` and `again`, the same batch."""
    spread = math.hypot(new.spread_seconds / new.seconds, again.spread_seconds / again.seconds)
    seconds = new.seconds * known.seconds / again.seconds
    return replace(new, seconds=seconds, spread_seconds=spread * seconds)


def with_measured(
    profile: ClusterProfile, points: Sequence[Sequence[BatchPoint]]
) -> ClusterProfile:
    """The profile with more points, by rank. They replace points of the same batch.

    A new point is moved towards the curve as far as its error is larger than what the curve leaves
    open there: it may have steps up to the next point.
    """
    measured = []
    for device, new in zip(profile.devices, points, strict=True):
        merged = {point.batch: point for point in (*device.points, *map(partial(_on, device), new))}
        ordered = tuple(merged[batch] for batch in sorted(merged))
        measured.append(replace(device, points=ordered))
    return replace(profile, devices=tuple(measured))


def _on(device: DeviceProfile, new: BatchPoint) -> BatchPoint:
    """A new point beside the curve of a device."""
    above = next((p for p in device.points if p.batch > new.batch), None)
    if above is None or not new.spread_seconds:
        return new
    expected = device.seconds(new.batch)
    open_variance = ((above.seconds - expected) / 2.0) ** 2
    proven = open_variance / (open_variance + new.spread_seconds**2)
    seconds = expected + proven * (new.seconds - expected)
    error = math.hypot(math.sqrt(proven) * new.spread_seconds, device.noise * seconds)
    return replace(new, seconds=seconds, spread_seconds=error)
