"""How much slower each rank is than its profile, from measured steps; notices when that changes.

Values in, values out. A residual is the logarithm of the measured compute seconds of a step over
the expected ones, without the effect of the lengths of its samples. The level of a rank is the
median of its residuals since its last change. Changes are found by a two-sided CUSUM of residuals
that are clipped, so that no single slow step is a change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple

CLIP = 2.0
"""Standard deviations of a residual that count at most."""
ALLOWANCE = 0.3
"""Standard deviations per step that are no change. With `CLIP` and `THRESHOLD`, 1.15x is found
within 20 steps at 10 % jitter: see `tests/unit/test_speed_changes.py`."""
THRESHOLD = 6.0
"""Standard deviations in sum that are a change."""
WINDOW = 64
"""Steps that a level rests on, at most."""
SETTLED = 8
"""Steps after a change was found from which its level is known. The steps that showed the change
are those with large residuals, so the level does not rest on them from then on."""
LEAST_DEVIATION = 0.02
"""Standard deviation of residuals that is assumed at least: speeds wander by a few percent."""
FIRST_DEVIATION = 0.1
"""Standard deviation before it is known."""
DIFFERENCES = 64
"""Of successive residuals, that the standard deviation rests on, at most."""
LEAST_DIFFERENCES = 20
"""Of successive residuals, from which on it is known."""
_PER_DIFFERENCE = 0.954
"""Median absolute difference of two normal values, in standard deviations."""
_ERROR_OF_MEDIAN = 1.2533
_MEMORY = 0.995
"""What a residual counts for the effect of lengths, relative to the next one."""
_PRIOR_SPREAD = 0.1
"""Sum of squares of log lengths that the prior exponent of 1 counts for."""


class Row(NamedTuple):
    """One rank in one step."""

    compute_seconds: float
    """NaN if unknown."""
    expected_seconds: float
    """By the profile, for the samples of the step; 0 without samples."""
    length: float
    """Elements of the tensors of its batch per sample, above 0."""


class SpeedLevels:
    """The levels of all ranks, step by step."""

    def __init__(self, ranks: int) -> None:
        self._ranks = [_RankLevel() for _ in range(ranks)]
        self._lengths = _LengthEffect(ranks)

    def add_lengths(self, rows: Sequence[Row]) -> None:
        """Add a step whose lengths are those of the profile on average, and that counts no more."""
        self._lengths.add_reference([math.log(row.length) for row in rows if row.length > 0.0])

    def add(self, rows: Sequence[Row]) -> list[int]:
        """Add one step of all ranks; returns the ranks whose level changes in it."""
        changed = []
        for rank, row in enumerate(rows):
            if not (row.compute_seconds > 0.0 and row.expected_seconds > 0.0):
                continue
            ratio = math.log(row.compute_seconds / row.expected_seconds)
            known, length = self._ranks[rank], math.log(row.length)
            residual = ratio - self._lengths.effect(length)
            if known.add(residual):
                changed.append(rank)
            self._lengths.add(rank, length, residual - known.level, known.deviation)
        return changed

    @property
    def levels(self) -> tuple[float, ...]:
        """By rank, the logarithm of its slowdown."""
        return tuple(known.level for known in self._ranks)

    @property
    def errors(self) -> tuple[float, ...]:
        """By rank, the standard error of its level; infinite until it is known."""
        return tuple(known.error for known in self._ranks)


class _RankLevel:
    """The level of one rank."""

    def __init__(self) -> None:
        self.level = 0.0
        self.deviation = FIRST_DEVIATION
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        self._differences: deque[float] = deque(maxlen=DIFFERENCES)
        self._sums = [0.0, 0.0]
        """Of a slowdown and of a speed-up."""
        self._counts = [0, 0]
        """Steps since each sum was 0."""
        self._steps = 0
        """Since the last change was found."""

    @property
    def error(self) -> float:
        """Standard error of the level; infinite until it is known."""
        count = len(self._residuals)
        known = self._steps >= SETTLED and len(self._differences) >= LEAST_DIFFERENCES
        return _ERROR_OF_MEDIAN * self.deviation / math.sqrt(count) if known else math.inf

    def add(self, residual: float) -> bool:
        """Add a residual; returns whether the level changes."""
        if self._residuals:
            # Differences of successive steps do not contain the level.
            self._differences.append(abs(residual - self._residuals[-1]))
            if len(self._differences) >= LEAST_DIFFERENCES:
                measured = median(self._differences) / _PER_DIFFERENCE
                self.deviation = max(LEAST_DEVIATION, measured)
        distance = (residual - self.level) / self.deviation if self._residuals else 0.0
        self._residuals.append(residual)
        self._steps += 1
        if self._steps == SETTLED:
            self._keep_last(SETTLED)
        clipped = min(max(distance, -CLIP), CLIP)
        changed = False
        for side, signed in enumerate((clipped, -clipped)):
            total = self._sums[side] + signed - ALLOWANCE
            self._sums[side] = max(0.0, total)
            self._counts[side] = self._counts[side] + 1 if total > 0.0 else 0
            if total > THRESHOLD:
                self._keep_last(self._counts[side])
                self._sums, self._counts, self._steps = [0.0, 0.0], [0, 0], 0
                changed = True
                break
        self.level = median(self._residuals)
        return changed

    def _keep_last(self, count: int) -> None:
        skipped = max(0, len(self._residuals) - count)
        self._residuals = deque(islice(self._residuals, skipped, None), maxlen=WINDOW)


class _LengthEffect:
    """Seconds grow with a power of the length that is the same on all ranks, about 1.

    Recursive least squares of residuals on the log length relative to the mean of the same rank, so
    that a slow rank with long samples does not change it.
    """

    def __init__(self, ranks: int) -> None:
        self._exponent = 1.0
        self._spread = self._product = 0.0
        self._means: list[float | None] = [None] * ranks
        self._references: list[float] = []
        self._reference = 0.0

    def add_reference(self, lengths: Sequence[float]) -> None:
        """Add log lengths of the profile."""
        self._references += lengths
        self._reference = fmean(self._references) if self._references else 0.0

    def effect(self, length: float) -> float:
        """What a log length adds to the log of the seconds."""
        return self._exponent * (length - self._reference)

    def add(self, rank: int, length: float, error: float, deviation: float) -> None:
        """Add what is left of a residual beside the level of the rank."""
        mean = self._means[rank]
        away = length - (length if mean is None else mean)
        self._means[rank] = length - away * _MEMORY if mean is not None else length
        bounded = min(max(error, -CLIP * deviation), CLIP * deviation)
        self._spread = _MEMORY * self._spread + away * away
        self._product = _MEMORY * self._product + away * (self._exponent * away + bounded)
        self._exponent = (self._product + _PRIOR_SPREAD) / (self._spread + _PRIOR_SPREAD)
