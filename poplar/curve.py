"""Curves through a few noisy points: what a device needs at any batch, and how sure that is.

Values to values. Between two measured batches a curve that never falls can be anywhere between
their values: a hard bound, but rungs that double the batch leave it a factor of two wide. What
narrows it are the other points. `MonotoneCurve.within` takes three shapes for possible:

- straight between two points;
- bent one way: between that line and the lines of the neighbouring points, continued, as far as
  noise does not explain that these differ;
- stepped, wholly or in part: growth comes at the multiples of some size (tiles of a matrix product,
  waves of blocks over a GPU's multiprocessors). A size is possible as far as it says where each
  point lies, from its two neighbours, about as well as the best of all sizes and the line do.

Points at powers of two cannot tell steps of 8 from a curve that is flat up to 8, then straight:
both stay possible, and the interval is as wide as they differ. One point more decides it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_SURE = 2.0
"""Standard errors between a value and the end of its interval."""
_CLOSE = 0.01
"""Being off by this part of a value does not speak against a shape: no curve is exactly one."""
_LEAST_ERROR = 1e-3
"""Of a value: a few samples that agree by chance don't make a point surer than this."""
_SIZES = (*(quarters / 4 for quarters in range(5, 64)), *map(float, range(16, 129)))
"""Samples of a step: whole ones in a tile, any number in a wave of blocks. Larger tiles are of
elements, and a sample has many."""
_PARTS = (1.0, 0.75, 0.5, 0.25)
"""How much of the growth may come in steps, where the best of all shapes is looked for."""


class _Steps(NamedTuple):
    """A shape: at the multiples of `size` samples comes up to this part of the growth."""

    size: float
    part: float


class _Miss(NamedTuple):
    """How far shapes miss a point, going by its neighbours."""

    straight: float
    stepped: float
    allowed: float
    """What says nothing against a shape."""


@dataclass(frozen=True)
class MonotoneCurve:
    """Through points of ascending batch whose values never fall; 0 where there are no samples."""

    batches: tuple[int, ...]
    values: tuple[float, ...]
    errors: tuple[float, ...] = ()
    """Standard errors of the values; empty: not known, and taken for 0."""

    def at(self, batch: int) -> float:
        """The value, on straight lines between the points; infinite past the last one.

        Below the first point the first line goes on, but not below proportion.
        """
        if batch <= 0:
            return 0.0
        batches, values = self.batches, self.values
        if batch > batches[-1]:
            return math.inf
        if len(batches) == 1:
            return values[0]  # one point says nothing of the slope: no less than that
        right = max(1, bisect_left(batches, batch))
        if batches[right] == batch:
            return values[right]
        value = self._line(right - 1, right, batch)
        return max(value, 0.0 if batch >= batches[0] else values[0] * batch / batches[0])

    def within(self, batch: int) -> tuple[float, float]:
        """Between which values the truth lies in nearly all cases: `(low, high)`.

        At a point a few of its standard errors away. Between two points what the shapes of this
        module say, no further than the two points. Below the first one between proportion and its
        value. Past the last one both are infinite. `at(batch)` lies within.
        """
        middle = self.at(batch)
        if not 0.0 < middle < math.inf:
            return middle, middle
        right = bisect_left(self.batches, batch)
        if self.batches[right] == batch:
            return self._least(right), self._most(right)
        if right == 0:
            proportion = self.values[0] * batch / self.batches[0]
            return min(proportion, middle), max(self._most(0), middle)
        left = right - 1
        part = (batch - self.batches[left]) / (self.batches[right] - self.batches[left])
        noise = math.hypot((1.0 - part) * self._error(left), part * self._error(right))
        possible = [middle, *self._bent(left, batch)]
        possible += [
            middle + steps.part * (self._stepped(left, right, batch, steps.size) - middle)
            for steps in self._steps
        ]
        low = max(min(possible) - _SURE * noise, self._least(left))
        high = min(max(possible) + _SURE * noise, self._most(right))
        return min(low, middle), max(high, middle)

    def _error(self, number: int) -> float:
        return self.errors[number] if self.errors else 0.0

    def _least(self, number: int) -> float:
        return max(0.0, self.values[number] - _SURE * self._error(number))

    def _most(self, number: int) -> float:
        return self.values[number] + _SURE * self._error(number)

    def _line(self, left: int, right: int, batch: int) -> float:
        """On the straight line through two points."""
        begin, end = self.batches[left], self.batches[right]
        low, high = self.values[left], self.values[right]
        return low + (batch - begin) / (end - begin) * (high - low)

    def _bent(self, left: int, batch: int) -> list[float]:
        """On the lines of both neighbours; of two on one side of the straight one, the nearer."""
        bends = []
        if left > 0:
            bends.append((batch - self.batches[left]) * self._steeper(left - 1, left))
        if left + 2 < len(self.batches):
            bends.append((batch - self.batches[left + 1]) * self._steeper(left + 1, left))
        if len(bends) == 2 and (bends[0] < 0.0) == (bends[1] < 0.0):
            bends = [min(bends, key=abs)]
        straight = self._line(left, left + 1, batch)
        return [straight + bend for bend in bends]

    def _steeper(self, one: int, other: int) -> float:
        """By how much one stretch between points is steeper than another, beyond noise."""
        slopes, errors = [], []
        for left in (one, other):
            width = self.batches[left + 1] - self.batches[left]
            slopes.append((self.values[left + 1] - self.values[left]) / width)
            errors.append(math.hypot(self._error(left), self._error(left + 1)) / width)
        steeper = slopes[0] - slopes[1]
        return math.copysign(max(0.0, abs(steeper) - math.hypot(*errors)), steeper)

    def _stepped(self, left: int, right: int, batch: int, size: float) -> float:
        """Between two points, if all growth came at the multiples of `size`."""
        begin, here, end = (
            math.ceil(samples / size)
            for samples in (self.batches[left], batch, self.batches[right])
        )
        if begin == end:
            return self._line(left, right, batch)
        low, high = self.values[left], self.values[right]
        return low + (here - begin) / (end - begin) * (high - low)

    @cached_property
    def _steps(self) -> list[_Steps]:
        """Of each size that the points allow, the largest part that they allow."""
        sizes = [size for size in _SIZES if size < self.batches[-1]]
        misses = [self._misses(size) for size in sizes]
        least = min(
            (
                max((abs(_missed(at, part)) / at.allowed for at in own), default=0.0)
                for own in misses
                for part in (0.0, *_PARTS)
            ),
            default=0.0,
        )
        found = []
        for size, own in zip(sizes, misses, strict=True):
            part = _largest_part(own, least + 1.0)
            if part > 0.0:
                found.append(_Steps(size, part))
        return found

    def _misses(self, size: float) -> list[_Miss]:
        """Of all points that have two neighbours."""
        return [
            _Miss(
                straight=self._line(at - 1, at + 1, self.batches[at]) - self.values[at],
                stepped=self._stepped(at - 1, at + 1, self.batches[at], size) - self.values[at],
                allowed=_CLOSE * self.values[at] + self._error(at),
            )
            for at in range(1, len(self.batches) - 1)
        ]


def _missed(miss: _Miss, part: float) -> float:
    return miss.straight + part * (miss.stepped - miss.straight)


def _largest_part(misses: Sequence[_Miss], times: float) -> float:
    """The largest part that misses no point by more than so often what is allowed; 0: none."""
    least, most = 0.0, 1.0
    for miss in misses:
        limit, away = times * miss.allowed, miss.stepped - miss.straight
        if away:
            ends = (limit - miss.straight) / away, (-limit - miss.straight) / away
            least, most = max(least, min(ends)), min(most, max(ends))
        elif abs(miss.straight) > limit:
            return 0.0
    return most if least <= most else 0.0


def straightened(
    batches: Sequence[int], values: Sequence[float], errors: Sequence[float]
) -> list[float]:
    """Values on the straight line through all points, if noise alone may keep them off it.

    A line rests on all points at once, so it is mostly nearer to the truth than each of them. That
    does not make it the truth: the errors remain what they are, and with them what `within` takes
    for possible. Points that the line misses by more than they explain, that are too few to tell,
    or whose errors are not known (0), stay as they are.

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
    """The non-decreasing sequence nearest to `values`: pools of violators take their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, many), (high, more) = pools.pop(), pools.pop()
            count = many + more
            pools.append(((low * many + high * more) / count, count))
    return [mean for mean, count in pools for _ in range(count)]
