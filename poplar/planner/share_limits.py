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
from poplar.planner.memory_shortfall import suffice

_MOST_WORK = 1 << 22
"""Ranks times samples; about 0.2 s."""


class Corner(NamedTuple):
    """A corner of a concave hull: a rank that holds these samples owns at most this share."""

    samples: int
    share: float


Hull = tuple[Corner, ...]
"""By ascending samples, from 0; between two corners the share is at most the line through them."""


def hull(corners: Iterable[Corner]) -> Hull:
    """The least concave function that is nowhere below these shares; by ascending samples."""
    kept: list[Corner] = []
    for last in corners:
        while len(kept) > 1 and _slope(*kept[-2:]) <= _slope(kept[-1], last):
            kept.pop()
        kept.append(last)
    return tuple(kept)


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
    return hull(Corner(samples, largest[samples]) for samples in sorted(largest))


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
        if self.spare >= 0.0 and len(self.by_rank) * self._at_most > _MOST_WORK:
            return self._at_most
        sums, _ = _core.largest_sum(self.by_rank, self._at_most)
        return max((size for size, total in enumerate(sums) if suffice([total])), default=-1)

    @staticmethod
    @lru_cache(4096)
    def _hull(limits: tuple[float, ...]) -> Hull:
        return hull(map(Corner, range(len(limits)), limits))

    def samples_beside(self, shares: Sequence[float]) -> list[float]:
        """By rank, the most samples beside its share, with parts of samples."""
        return list(map(_inverse, map(self._hull, self.by_rank), shares))

    @staticmethod
    def losses(limits: tuple[float, ...]) -> list[float]:
        """What each sample takes of the largest share, by the hull; ascending."""
        return [
            -_slope(first, last)
            for first, last in pairwise(ShareLimits._hull(limits))
            for _ in range(last.samples - first.samples)
        ]


def _inverse(own: Hull, share: float) -> float:
    """The most samples at which a hull is not below a share."""
    for first, last in pairwise(own):
        if last.share < share:
            part = (first.share - share) / (first.share - last.share)
            return max(0.0, first.samples + part * (last.samples - first.samples))
    return float(own[-1].samples)


def _slope(first: Corner, last: Corner) -> float:
    return (last.share - first.share) / (last.samples - first.samples)
