"""Statistics of measured times: curves through a few noisy points, and the error of a median.

Values in, values out. Every curve is monotone: a larger batch never takes less time or memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

LEVEL = 0.8
"""Probability with which a value lies in its interval."""
DEVIATIONS = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
"""Standard deviations on each side of the mean in such an interval: 1.28."""
_LEAST_ERROR = 1e-3
"""Relative error that is assumed at least: a few samples may agree by chance."""
_DEVIATION = 1.4826
"""Standard deviation over median deviation of a normal distribution."""
_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean."""
_USUAL_SAMPLES = 4
"""Samples that the usual deviation counts as much as."""
_FAR = 3.0
"""Standard deviations from which on a value is an outlier."""
_ROUNDS = 5
"""Of fitting a line and the variance of the points' true distances to it."""


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

    def up_to(self, most: int) -> list[float]:
        """`at(0)`, `at(1)`, ... `at(most)`, faster than by themselves; `most` is in the curve."""
        batches, values = self.batches, self.values
        found = list(map(self.at, range(min(most, batches[0]) + 1)))
        for right in range(1, len(batches)):
            begin, end = batches[right - 1], batches[right]
            low, rise = values[right - 1], values[right] - values[right - 1]
            inside = range(begin + 1, min(most + 1, end))
            found += [low + (batch - begin) / (end - begin) * rise for batch in inside]
            if end <= most:
                found.append(values[right])
        return found


def deviation(samples: Sequence[float], usual: float = 0.0) -> float:
    """Relative standard deviation of values above 0, from the median deviation of the median.

    Robust: a few disturbed samples do not change it. A few samples may agree by chance, so the
    `usual` deviation counts as much as `_USUAL_SAMPLES` samples; 0: unknown.
    """
    count, middle = len(samples), median(samples)
    own = _DEVIATION * median(abs(sample / middle - 1.0) for sample in samples)
    own *= math.sqrt(count / max(1, count - 1))
    if not usual:
        return own
    return math.sqrt((count * own**2 + _USUAL_SAMPLES * usual**2) / (count + _USUAL_SAMPLES))


def error_of_median(samples: Sequence[float], usual: float = 0.0) -> float:
    """Relative standard error of the median, from `deviation`; 0 for a single sample alone."""
    return _MEDIAN_OVER_MEAN * deviation(samples, usual) / math.sqrt(len(samples))


def usual_value(samples: Sequence[float]) -> float:
    """The mean of values above 0 without outliers: those are counted as `_FAR` deviations away.

    Passes that take longer now and then make the mean of a step longer, which a median would miss.
    """
    middle, far = median(samples), _FAR * deviation(samples) * median(samples)
    return fmean(min(max(sample, middle - far), middle + far) for sample in samples)


def errors_of_medians(samples: Sequence[Sequence[float]]) -> list[float]:
    """Standard errors of the medians of series of one device, whose deviations tell of each other.

    0 if no series has several samples.
    """
    usual = median([deviation(own) for own in samples if len(own) > 1] or [0.0])
    return [median(own) * error_of_median(own, usual) for own in samples]


def fitted(
    batches: Sequence[int], values: Sequence[float], errors: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Values on the curve that all points show together, and their standard errors.

    The curve is a line and what the data prove beyond it: the distances to the weighted
    least-squares line are shrunk by the part of them that the errors explain (empirical Bayes; the
    variance of true distances is that of DerSimonian and Laird). Exact values stay as they are,
    very noisy ones move onto the line, and so one lucky value moves nothing.

    Args:
        batches: at least one, ascending.
        values: above 0.
        errors: standard errors of the values.

    Returns:
        Both unchanged if an error is 0 (unknown), if there are fewer than three points, or if the
        line falls.
    """
    unchanged = list(values), list(errors)
    if len(batches) < 3 or min(errors) <= 0.0:
        return unchanged
    noise = [max(e / v, _LEAST_ERROR) ** 2 for e, v in zip(errors, values, strict=True)]
    beyond, line = 0.0, list(values)
    for _ in range(_ROUNDS):
        # Relative to the line: a lucky value must not count more because it is small.
        weights = [1.0 / (n + beyond) / on**2 for n, on in zip(noise, line, strict=True)]
        weight = math.fsum(weights)
        middle = math.fsum(w * b for w, b in zip(weights, batches, strict=True)) / weight
        height = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / weight
        away = [batch - middle for batch in batches]
        lever = math.fsum(w * a * a for w, a in zip(weights, away, strict=True))
        slope = math.fsum(w * a * v for w, a, v in zip(weights, away, values, strict=True)) / lever
        slope = min(slope, height / middle)  # no latency is negative
        line = [height + slope * a for a in away]
        if slope < 0.0:
            return unchanged
        missed = [v / on - 1.0 for v, on in zip(values, line, strict=True)]
        surplus = math.fsum(m * m / n for m, n in zip(missed, noise, strict=True)) - (len(line) - 2)
        beyond = max(0.0, surplus / math.fsum(1.0 / n for n in noise))
    proven = [beyond / (beyond + n) for n in noise]
    found = [on * (1.0 + p * m) for on, p, m in zip(line, proven, missed, strict=True)]
    of_line = [math.sqrt(1.0 / weight + a * a / lever) for a in away]
    left = [
        math.hypot(math.sqrt(p * n) * on, (1.0 - p) * of)
        for p, n, on, of in zip(proven, noise, line, of_line, strict=True)
    ]
    return found, left


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
