"""Statistics of measured times: curves through a few noisy points, and the error of a median.

Values in, values out. Every curve is monotone: a larger batch never takes less time or memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LEAST_ERROR = 1e-3
"""Relative error that is assumed at least: a few samples may agree by chance."""
_ERROR_PER_DEVIATION = 1.4826 * math.sqrt(math.pi / 2)
"""Standard deviation over median deviation of a normal distribution, times the standard error of a
median over that of a mean."""


@dataclass(frozen=True)
class MonotoneCurve:
    """Straight lines through points of ascending batch with non-decreasing values; `at(0) == 0`."""

    batches: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, batch: int) -> float:
        """The interpolated value; infinite past the last point.

        Below the first point the first line is extended, but never below proportionality.
        """
        if batch <= 0:
            return 0.0
        batches, values = self.batches, self.values
        if batch > batches[-1]:
            return math.inf
        if len(batches) == 1:
            return values[0]  # one point gives no slope, so its value is the bound
        right = max(1, bisect_left(batches, batch))
        if batches[right] == batch:
            return values[right]
        begin, end = batches[right - 1], batches[right]
        low, high = values[right - 1], values[right]
        value = low + (batch - begin) / (end - begin) * (high - low)
        return max(value, 0.0 if batch >= batches[0] else values[0] * batch / batches[0])


def error_of_median(samples: Sequence[float]) -> float:
    """Standard error of the median, from the median absolute deviation; 0 for a single sample.

    Robust: a few disturbed samples do not change it.
    """
    middle = median(samples)
    deviation = median(abs(sample - middle) for sample in samples)
    return _ERROR_PER_DEVIATION * deviation / math.sqrt(len(samples))


def straightened(
    batches: Sequence[int], values: Sequence[float], errors: Sequence[float]
) -> list[float]:
    """Replace values by a weighted least-squares line if noise alone explains their distance to it.

    The line uses all points at once, so it is usually closer to the truth than each point. Values
    stay unchanged if the line misses them by more than their errors explain, if there are fewer
    than three points, or if an error is unknown (0).

    Args:
        batches: at least one, ascending.
        values: above 0.
        errors: standard errors of the values.
    """
    surplus = len(batches) - 2
    if surplus < 1 or min(errors) <= 0.0:
        return list(values)
    spread = [max(error, _LEAST_ERROR * value) for value, error in zip(values, errors, strict=True)]
    weights = [error**-2 for error in spread]
    weight = math.fsum(weights)
    middle = math.fsum(w * batch for w, batch in zip(weights, batches, strict=True)) / weight
    height = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / weight
    away = [batch - middle for batch in batches]
    lever = math.fsum(w * a * a for w, a in zip(weights, away, strict=True))
    slope = math.fsum(w * a * v for w, a, v in zip(weights, away, values, strict=True)) / lever
    line = [height + slope * a for a in away]
    missed = math.fsum(w * (v - on) ** 2 for w, v, on in zip(weights, values, line, strict=True))
    too_far = missed > surplus + math.sqrt(2.0 * surplus)
    return list(values) if too_far or slope < 0.0 or line[0] <= 0.0 else line


def pooled(values: Sequence[float]) -> list[float]:
    """Isotonic regression: the non-decreasing sequence nearest to `values` in least squares."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, many), (high, more) = pools.pop(), pools.pop()
            count = many + more
            pools.append(((low * many + high * more) / count, count))
    return [mean for mean, count in pools for _ in range(count)]
