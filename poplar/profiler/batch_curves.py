"""Time and memory of plain passes against the batch, measured on all ranks at once.

Ranks measure together for equally long, so a core, a memory bus or a power budget that they share
is shared as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from poplar.profile import BatchPoint
from poplar.profiler.memory_budget import MemoryBudget
from poplar.profiler.noise import CpuUse
from poplar.profiler.passes import Timings, climb, time_sizes
from poplar.profiler.points import at_speed_of, on_a_line, times_to_be_sure
from poplar.profiler.preserved_state import computing_in
from poplar.profiler.progress import Report
from poplar.profiler.request import DEFAULT_MAX_BATCH
from poplar.profiler.session import Session
from poplar.system import devices

TIMES_EACH = 5
"""Passes of a size that are timed, if all sizes take equally long."""
LONGEST_PASS = 1 / 10
"""Part of the time budget; no batch is tried whose pass would probably take longer."""
TIMING = 0.35
"""Part of the time budget for timing plain passes."""


@dataclass(frozen=True)
class BatchCurve:
    """Measured passes of one rank."""

    points: tuple[BatchPoint, ...]
    backward_fraction: float
    throttled: str
    """Why the device ran below its clocks; empty if it did not."""
    cpu_use: CpuUse | None
    """Of this rank's host while passes were timed; None where passes run on a GPU."""


@dataclass(frozen=True)
class BatchCurves:
    """Measured passes of all ranks."""

    by_rank: list[BatchCurve]
    noise: float
    """How many times as many samples were needed to be sure of a median; 1 on a quiet machine."""


def measure_curves(session: Session, budget: MemoryBudget, report: Report) -> BatchCurves:
    """Measure the curve of every rank. Collective.

    If repeated passes differ much, more of them are timed, within the part `TIMING` of the budget.
    """
    passes, seconds = session.passes(), session.request.seconds
    report("a first pass")
    session.on_all_ranks(passes.check, "the profiler's first pass")
    report("memory against batch")

    def climb_sizes() -> list[BatchPoint]:
        return climb(
            passes,
            max_batch=session.request.max_batch or DEFAULT_MAX_BATCH,
            activation_bytes=budget.activation_bytes,
            longest_seconds=seconds * LONGEST_PASS,
        )

    by_rank = session.on_all_ranks(climb_sizes, "measuring memory")
    sizes = by_rank[session.group.rank]
    longest = max(sum(size.seconds for size in own) for own in by_rank)
    timing = min(TIMES_EACH * longest, seconds * TIMING)
    report(f"time against batch, {timing:.0f} s")
    timings = Timings(passes, sizes)
    curves = _timed(session, timings, timing)
    noise = times_to_be_sure(curve.points for curve in curves)
    more = min((noise - 1.0) * timing, seconds * TIMING - timing)
    if more > 0.0:
        report(f"time against batch, {more:.0f} s more: repeated passes differ")
        curves = _timed(session, timings, more)
    return BatchCurves([replace(curve, points=on_a_line(curve.points)) for curve in curves], noise)


def measure_points(
    session: Session, batches: Sequence[Sequence[int]], references: Sequence[BatchPoint]
) -> list[list[BatchPoint]]:
    """Measure more batches, relative to a point of each rank's curve. Collective.

    The reference is measured again in turns with the new batches, and new points are scaled to the
    speed at which it was measured first: a device may be a few percent faster or slower by now,
    which must not look like a step in its curve. Ranks without new batches run their reference.

    Args:
        batches: by rank, sizes to measure; may be empty.
        references: by rank, a point of its curve.

    Returns:
        By rank, the new points, on every rank.
    """
    passes, rank = session.passes(), session.group.rank
    reference = references[rank]
    wanted = [*batches[rank], reference.batch]

    def first_passes() -> list[BatchPoint]:
        return [
            BatchPoint(
                batch=size,
                activation_bytes=passes.activation_bytes(size),
                seconds=passes.seconds(size),
            )
            for size in wanted
        ]

    with computing_in(session.request.model, session.agreed.dtype):
        by_rank = session.on_all_ranks(first_passes, "the first passes of new batch sizes")
        seconds = TIMES_EACH * max(sum(size.seconds for size in own) for own in by_rank)

        def measure() -> list[BatchPoint]:
            *points, again = time_sizes(passes, by_rank[rank], seconds=seconds, least=TIMES_EACH)
            return [at_speed_of(reference, point, again) for point in points]

        return session.on_all_ranks(measure, "measuring new batch sizes")


def _timed(session: Session, timings: Timings, seconds: float) -> list[BatchCurve]:
    return session.on_all_ranks(lambda: _own_curve(session, timings, seconds), "timing passes")


def _own_curve(session: Session, timings: Timings, seconds: float) -> BatchCurve:
    device = session.device
    cpu_before = None if session.asynchronous else CpuUse.now()
    throttled = devices.throttle_reason(device)
    timings.run(seconds, least=2)
    throttled = throttled or devices.throttle_reason(device)
    if throttled:  # measure once more: the device may have cooled down
        timings.forget()
        timings.run(seconds, least=2)
        throttled = devices.throttle_reason(device)
    points = timings.points
    return BatchCurve(
        points=points,
        backward_fraction=timings.passes.backward_fraction(points[len(points) // 2].batch),
        throttled=throttled,
        cpu_use=None if cpu_before is None else CpuUse.now().since(cpu_before),
    )
