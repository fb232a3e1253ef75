"""How many samples and how much state the ranks together hold in one pass.

The larger a rank's part of a pass, the smaller the share that it can own beside it. Bounds of the
search use the concave hull of that share over the samples: then every sample takes a part of it,
and the first samples take the least.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from poplar import _core

_MOST_STEPS = 1 << 26
"""Of `_core.largest_sum`; about 0.2 s."""
_ROUNDING = 1e-12


class Corner(NamedTuple):
    """A corner of a concave hull: a rank that holds these samples owns at most this share."""

    samples: int
    share: float


Hull = tuple[Corner, ...]
"""By ascending samples, from 0; between two corners the share is at most the line through them."""


def convex_hull(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The corners of the largest convex function that is nowhere above these ascending points."""
    corners: list[tuple[int, float]] = []
    for at, value in points:
        while len(corners) > 1:
            (before, early), (after, late) = corners[-2:]
            if (late - early) * (at - after) < (value - late) * (after - before):
                break
            corners.pop()
        corners.append((at, value))
    return corners


def hull(corners: Iterable[tuple[int, float]]) -> Hull:
    """The least concave function that is nowhere below these shares; by ascending samples."""
    mirrored = convex_hull((samples, -share) for samples, share in corners)
    return tuple(Corner(samples, -share) for samples, share in mirrored)


def hull_of_step(first: Sequence[float], later: Sequence[float], passes: int, at_most: int) -> Hull:
    """The largest share of a rank beside the samples of all its passes of a step.

    Args:
        first: the largest share beside 0, 1, ... samples in the first pass; descending.
        later: the same for each pass after it; empty if there is only one.
        passes: how many there are at most.
        at_most: more samples are not needed.
    """
    largest: dict[int, float] = {}
    for share in sorted({*first, *later}):
        samples = _beside(first, share) + (passes - 1) * max(0, _beside(later, share))
        if min(_beside(first, share), _beside(later, share) if later else 0) >= 0:
            largest[min(samples, at_most)] = share
    largest[0] = max([*largest.values(), first[0] if not later else min(first[0], later[0])])
    return hull(sorted(largest.items()))


def _beside(limits: Sequence[float], share: float) -> int:
    """The most samples beside a share; -1: not even none."""
    return bisect_right(limits, -share, key=operator.neg) - 1


class ShareLimits:
    """By rank, the largest share beside 0, 1, ... samples of a pass."""

    def __init__(self, by_rank: Sequence[tuple[float, ...]], at_most: int) -> None:
        """`at_most`: more samples are not needed."""
        self.by_rank = by_rank
        self.spare = math.fsum(limits[0] for limits in by_rank) - 1.0
        """Shares without samples, beyond what the ranks together own."""
        self._at_most = min(at_most, sum(len(limits) - 1 for limits in by_rank))

    @cached_property
    def most(self) -> int:
        """The most samples of a pass beside which the ranks together own everything; -1: none.

        With many ranks and samples only an upper bound, because the exact number takes too long.
        """
        if _is_exact(self.by_rank, self._at_most):
            sums, _ = _core.largest_sum(self.by_rank, self._at_most)
            return max((size for size, total in enumerate(sums) if suffice([total])), default=-1)
        if self.spare + _ROUNDING < 0.0:
            return -1
        edges = ((loss, samples) for loss, _, samples in _edges(self.by_rank))
        return min(samples_within(self.spare, edges), self._at_most)

    def samples_beside(self, shares: Sequence[float]) -> list[float]:
        """By rank, the most samples beside its share, with parts of samples."""
        return list(map(_inverse, map(_hull_of, self.by_rank), shares))

    @staticmethod
    def losses(limits: tuple[float, ...]) -> list[float]:
        """What each sample takes of the largest share, by the hull; ascending."""
        return [loss for loss, _, samples in _edges([limits]) for _ in range(samples)]


def samples_within(spare: float, losses: Iterable[tuple[float, int]]) -> int:
    """The most samples that take no more than what is spare, if those that take the least come
    first; rounded up if a part of one fits within rounding errors.

    Args:
        losses: what each sample takes, ascending, and how many samples take it.
    """
    left, held = spare + _ROUNDING, 0
    for loss, samples in losses:
        if loss * samples > left:
            return held + int(left / loss + _ROUNDING)
        left -= loss * samples
        held += samples
    return held


def suffice(largest: Sequence[float]) -> bool:
    """Whether ranks with these largest shares can own everything, up to rounding."""
    return math.fsum(largest) >= 1.0 - _ROUNDING


def largest_sum(by_rank: Sequence[tuple[float, ...]], total: int) -> list[int]:
    """By rank, its samples of a pass of `total`, beside which the ranks together own the most.

    With many ranks and samples the ranks take samples along their hulls, because the exact result
    takes too long. All of them but one then end at a corner, so the sum is lower than the largest
    one by at most what that rank is below its hull.

    Args:
        by_rank: the largest share beside 0, 1, ... samples; descending, for `total` in all.
        total: not negative.
    """
    if _is_exact(by_rank, total):
        return _core.largest_sum(by_rank, total)[1]
    parts = [0] * len(by_rank)
    for _, rank, samples in _edges(by_rank):
        parts[rank] += min(samples, total)
        total -= min(samples, total)
    return parts


def _is_exact(by_rank: Sequence[tuple[float, ...]], total: int) -> bool:
    """Whether `_core.largest_sum` takes few steps: one for each sample and size of a rank."""
    return sum(map(len, by_rank)) * (total + 1) <= _MOST_STEPS


@lru_cache(4096)
def _hull_of(limits: tuple[float, ...]) -> Hull:
    return hull(enumerate(limits))


def _edges(by_rank: Sequence[tuple[float, ...]]) -> list[tuple[float, int, int]]:
    """The edges of all hulls, flattest first: what each sample takes, the rank, the samples."""
    return sorted(
        (-_slope(first, last), rank, last.samples - first.samples)
        for rank, limits in enumerate(by_rank)
        for first, last in pairwise(_hull_of(limits))
    )


def _inverse(own: Hull, share: float) -> float:
    """The most samples at which a hull is not below a share."""
    for first, last in pairwise(own):
        if last.share < share:
            part = (first.share - share) / (first.share - last.share)
            return max(0.0, first.samples + part * (last.samples - first.samples))
    return float(own[-1].samples)


def _slope(first: Corner, last: Corner) -> float:
    return (last.share - first.share) / (last.samples - first.samples)
