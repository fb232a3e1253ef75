"""How much slower each rank is than its profile, from measured steps; notices when that changes.

Values in, values out. A residual is the logarithm of the measured compute seconds of a step over
the expected ones, without the effect of the lengths of its samples. The level of a rank is the mean
of its residuals since its last change. Changes are found by the ratio of likelihoods: of all ways
to divide the residuals into earlier and later ones, the one whose two means differ most, relative
to their standard error. Residuals that are far from their neighbours count as the neighbours do, so
no single slow step is a change.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from statistics import fmean, median
from typing import NamedTuple

CLIP = 3.0
"""Standard deviations of a residual that count at most."""
NEIGHBOURS = 7
"""Latest residuals, whose median replaces one that is farther from it than `CLIP`."""
NOTICED = 2.5
"""Standard errors between two means that are a change. 1.15x at 10 % jitter is then noticed within
20 steps in 99 % of events: see `tests/unit/test_speed_changes.py`. `replanning.CERTAINTY` decides
about plans."""
FORGOTTEN = 5.0
"""Standard errors from which on the residuals before a change are dropped."""
WINDOW = 96
"""Steps that a level rests on, at most."""
LATEST = (4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 56, 66, 80)
"""Numbers of steps since a change that are tried."""
SETTLED = 8
"""Steps before and after a change from which on a level is known."""
LEAST_DEVIATION = 0.02
"""Standard deviation of residuals that is assumed at least: speeds wander by a few percent."""
FIRST_DEVIATION = 0.1
"""Standard deviation before it is known."""
FIRST_COUNT = 20
"""Differences of successive residuals that it counts for."""
LEAST_DIFFERENCES = 20
"""Differences from which on the standard deviation is known."""
MOST_DIFFERENCES = 200
"""Differences that it rests on, about."""
_MEMORY = 0.995
"""What a residual counts for the effect of lengths, relative to the next one."""
_PRIOR_SPREAD = 0.1
"""Sum of squares of log lengths that the prior exponent of 1 counts for."""


class Row(NamedTuple):
    """One rank in one step."""

    compute_seconds: float
    """NaN if unknown."""
    expected_seconds: float
    """By the profile, for the samples of the step; 0 without samples, infinite if unknown."""
    length: float
    """Elements of the tensors of its batch per sample, above 0; 1 if unknown."""

    @property
    def has_work(self) -> bool:
        """It has samples, and which ones is known; else its length means nothing."""
        return self.expected_seconds > 0.0


class SpeedLevels:
    """The levels of all ranks, step by step."""

    def __init__(self, levels: Sequence[float]) -> None:
        """`levels`: by rank, before anything is known."""
        self._ranks = list(map(_RankLevel, levels))
        self._lengths = _LengthEffect(len(levels))

    def add_lengths(self, rows: Sequence[Row]) -> None:
        """Add a step whose lengths are those of the profile on average, and that counts no more."""
        self._lengths.add_reference([math.log(row.length) for row in rows if row.has_work])

    def add(self, rows: Sequence[Row]) -> None:
        """Add one step of all ranks."""
        for rank, row in enumerate(rows):
            if not (row.compute_seconds > 0.0 and 0.0 < row.expected_seconds < math.inf):
                continue
            ratio = math.log(row.compute_seconds / row.expected_seconds)
            known, length = self._ranks[rank], math.log(row.length)
            residual = ratio - self._lengths.effect(length)
            known.add(residual)
            self._lengths.add(rank, length, residual - known.level, known.deviation)

    def look_for_changes(self) -> None:
        """Update the levels. It costs more than `add`."""
        for known in self._ranks:
            known.look_for_changes()

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

    def __init__(self, level: float) -> None:
        self.level = level
        self.deviation = FIRST_DEVIATION
        self._measured: deque[float] = deque(maxlen=NEIGHBOURS)
        self._residuals: deque[float] = deque(maxlen=WINDOW)
        """Without those that are far from their neighbours."""
        self._latest = 0
        """Residuals that the level rests on."""
        self._differences = 0
        """That the deviation rests on."""

    @property
    def error(self) -> float:
        """Standard error of the level; infinite until it is known."""
        known = self._latest >= SETTLED and self._differences >= LEAST_DIFFERENCES
        return self.deviation / math.sqrt(self._latest) if known else math.inf

    def add(self, residual: float) -> None:
        """Add a residual."""
        self._measured.append(residual)
        usual = median(self._measured)
        if abs(residual - usual) > CLIP * self.deviation:
            residual = usual
        if self._residuals:
            self._add_difference(residual - self._residuals[-1])
        self._residuals.append(residual)

    def look_for_changes(self) -> None:
        """Update the level."""
        if not self._residuals:
            return
        certainty, count = self._latest_change()
        self._latest = count if certainty > NOTICED else len(self._residuals)
        skipped = len(self._residuals) - self._latest
        latest = list(islice(self._residuals, skipped, None))
        if certainty > FORGOTTEN:
            self._residuals = deque(latest, maxlen=WINDOW)
        latest.sort()
        usual, most = latest[(len(latest) - 1) // 2], CLIP * self.deviation
        near = latest[bisect_left(latest, usual - most) : bisect_right(latest, usual + most)]
        self.level = fmean(near)

    def _add_difference(self, difference: float) -> None:
        """Add a difference of successive residuals, which does not contain the level."""
        self._differences = min(self._differences + 1, MOST_DIFFERENCES)
        variance = self.deviation**2
        measured = min(difference**2 / 2.0, CLIP**2 * variance)
        variance += (measured - variance) / (self._differences + FIRST_COUNT)
        self.deviation = max(LEAST_DEVIATION, math.sqrt(variance))

    def _latest_change(self) -> tuple[float, int]:
        """Standard errors between the means before and after a change, and the steps after it."""
        sums = list(accumulate(reversed(self._residuals)))
        number = len(sums)
        found = 0.0, number
        for count in LATEST:
            before = number - count
            if before < SETTLED:
                break
            distance = abs(sums[count - 1] / count - (sums[-1] - sums[count - 1]) / before)
            errors = distance * math.sqrt(count * before / number) / self.deviation
            found = max(found, (errors, count))
        return found


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
