"""Which batch sizes a rank runs, up to its limits, and how they are timed."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from poplar.profiler.passes import Passes
from poplar.profiler.session import Session
from poplar.profiler.timing import repeats_in_a_sample
from poplar.values.curve import errors_of_medians, usual_value
from poplar.values.profile import BatchPoint

DEFAULT_MAX_BATCH = 1024
"""Largest batch that is tried if neither memory nor time sets a limit."""
LONGEST_PASS = 1 / 10
"""Part of the time budget; no batch is tried whose pass would probably take longer."""
MARGIN = 0.97
"""Part of the free memory for which the largest batch is extrapolated."""
NEAR_ENOUGH = 1 / 8
"""Relative distance to a batch that was too large at which the search for the largest ends."""
SMALL_SIZES = (1, 2, 4)
"""Sizes whose memory gives the line that predicts the largest batch."""
CONFIRMATIONS = 2
"""Sizes near the limit that are tried."""
WORTHWHILE = 0.01
"""A batch that is larger by less than this fraction is not tried. The largest one is wanted within
3 %, and a line may end below it."""


@dataclass(frozen=True, kw_only=True)
class SizeLimits:
    """How far the batch sizes of a rank go."""

    max_batch: int
    """Largest batch to try."""
    activation_bytes: float
    """What activations may take; the last size is the largest that fits."""
    longest_seconds: float
    """No pass is tried that would probably take longer."""

    @classmethod
    def of(cls, session: Session, *, sharded: bool) -> SizeLimits:
        """Those of this rank, with sharded or with whole parameters beside the activations."""
        memory = session.memory.sharded if sharded else session.memory.unsharded
        return cls(
            max_batch=session.job.max_batch or DEFAULT_MAX_BATCH,
            activation_bytes=memory[session.group.rank],
            longest_seconds=session.job.profile_seconds * LONGEST_PASS,
        )


def climb(passes: Passes, limits: SizeLimits) -> Iterator[list[BatchPoint]]:
    """First passes of sizes 1, 2, 4, ... as far as memory and time allow.

    Yields the sizes so far after each one that was tried, because a size may take minutes to warm
    up and other ranks wait.

    Raises:
        torch.OutOfMemoryError: not even one sample fits.
    """
    max_batch, activation_bytes = limits.max_batch, limits.activation_bytes
    sizes: list[BatchPoint] = []
    size, too_large = 1, 2 * max_batch  # so far no size is known to be too large
    while True:
        tried = _first_pass(passes, size, must_fit=not sizes)
        if tried is None or (tried.activation_bytes > activation_bytes and sizes):
            too_large = size
        else:
            sizes.append(tried)
        last = sizes[-1]
        size = min(2 * last.batch, max_batch)
        if len(sizes) > 1:
            fitting = largest_on_a_line(sizes, activation_bytes * MARGIN)
            size = int(min(size, max(last.batch, fitting)))
        if size >= too_large:
            size = (last.batch + too_large) // 2
        takes_too_long = (
            last.seconds * size / last.batch > limits.longest_seconds and len(sizes) > 1
        )
        is_near = too_large - last.batch <= last.batch * NEAR_ENOUGH
        yield sizes
        if size <= last.batch or takes_too_long or is_near:
            return


def _first_pass(passes: Passes, size: int, *, must_fit: bool) -> BatchPoint | None:
    """The first pass of a size; None if it does not fit.

    Raises:
        torch.OutOfMemoryError: it does not, and must.
    """
    with suppress(torch.OutOfMemoryError):
        return passes.first(size)
    if must_fit:
        raise torch.OutOfMemoryError(
            "not even one sample fits in the memory of the device; use shorter samples, activation "
            "checkpointing or a smaller model"
        )
    return None


def probe(
    passes: Passes, limits: SizeLimits, *, known: Sequence[BatchPoint] = ()
) -> Iterator[list[BatchPoint]]:
    """First passes of few sizes: small ones, then the largest that fits by a straight line.

    Yields as `climb` does.

    Args:
        known: points measured in another way. If there are any, the last one takes the place of the
            small sizes: it is measured again, as a reference for the new ones. If it does not fit,
            the largest one that does is measured again, and no new ones.

    Raises:
        torch.OutOfMemoryError: not even the first size fits.
    """
    max_batch, activation_bytes = limits.max_batch, limits.activation_bytes
    sizes: list[BatchPoint] = []
    over: BatchPoint | None = None
    too_large, confirmations = max_batch + 1, CONFIRMATIONS
    reference = _reference(passes, known, activation_bytes) if known else None
    small = [size for size in SMALL_SIZES if size <= max_batch] if reference is None else []
    size = small.pop(0) if reference is None else reference.batch
    while True:
        tried = reference or _first_pass(passes, size, must_fit=not sizes)
        reference = None
        if tried is not None and (tried.activation_bytes <= activation_bytes or not sizes):
            sizes.append(tried)
        else:
            too_large, over = size, tried
        yield sizes
        if known and size < known[-1].batch:
            return
        last = sizes[-1]
        line = [*known[:-1], *sizes, *([over] if over else [])]
        largest = min(max_batch, too_large - 1, last.batch * limits.longest_seconds / last.seconds)
        if over is None and too_large <= max_batch:  # ran out of memory: its bytes are not known
            largest = min(largest, (last.batch + too_large) // 2)
        elif len(line) > 1:
            largest = min(largest, largest_on_a_line(line, activation_bytes))
        else:
            largest = min(largest, 2 * last.batch)
        if small and small[0] < too_large and (small[0] <= largest or len(line) == 1):
            size = small.pop(0)
        elif confirmations and int(largest) > last.batch * (1 + WORTHWHILE):
            small, size, confirmations = [], int(largest), confirmations - 1
        else:
            return


def _reference(passes: Passes, known: Sequence[BatchPoint], activation_bytes: float) -> BatchPoint:
    """The first pass of the largest known size that fits; see `probe`."""
    first, *others = [p for p in known if p.activation_bytes <= activation_bytes] or known[:1]
    for point in reversed(others):
        if tried := _first_pass(passes, point.batch, must_fit=False):
            return tried
    smallest = _first_pass(passes, first.batch, must_fit=True)
    assert smallest is not None
    return smallest


def largest_on_a_line(points: Sequence[BatchPoint], activation_bytes: float) -> float:
    """The largest batch that fits, by a line through the last two points; infinite if it is flat.

    Args:
        points: at least two, by ascending batch.
    """
    before, last = points[-2:]
    slope = (last.activation_bytes - before.activation_bytes) / (last.batch - before.batch)
    left = activation_bytes - last.activation_bytes
    return last.batch + left / slope if slope > 0 else math.inf


Samples = defaultdict[int, list[float]]
"""Seconds of passes, by batch."""


def time_sizes(
    passes: Passes,
    sizes: Sequence[BatchPoint],
    *,
    seconds: float,
    least: int,
    samples: Samples | None = None,
) -> list[BatchPoint]:
    """Time sizes in turns, so that a disturbance affects all of them.

    Args:
        sizes: with rough times, which determine how many short passes are timed at once.
        seconds: time budget; exceeded until each size has been timed `least` times in all.
        least: see `seconds`.
        samples: of earlier calls; those of this call are added.
    """
    samples = defaultdict(list) if samples is None else samples
    end = time.perf_counter() + seconds
    for size in cycle([*sizes, *reversed(sizes)]):
        enough = all(len(samples[each.batch]) >= least for each in sizes)
        if enough and time.perf_counter() >= end:
            break
        repeats = repeats_in_a_sample(size.seconds)
        samples[size.batch].append(passes.seconds(size.batch, repeats))
    errors = errors_of_medians([samples[size.batch] for size in sizes])
    return [
        replace(size, seconds=usual_value(samples[size.batch]), spread_seconds=error)
        for size, error in zip(sizes, errors, strict=True)
    ]
