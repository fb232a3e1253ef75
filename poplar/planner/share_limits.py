"""How many samples and how much state the ranks together hold in one pass.

The larger a rank's part of a pass, the smaller the share that it can own beside it. Bounds of the
search use the concave hull of that share over the samples: then every sample takes a part of it,
and the first samples take the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from poplar import _core
from poplar.planner.memory_shortfall import suffice


class Hull(NamedTuple):
    """A corner of a concave hull."""

    samples: int
    share: float


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
        """The most samples of a pass beside which the ranks together own everything; -1: none."""
        sums, _ = _core.largest_sum(self.by_rank, self._at_most)
        return max((size for size, total in enumerate(sums) if suffice([total])), default=-1)

    @staticmethod
    def hull(limits: Sequence[float]) -> list[Hull]:
        """The corners of the least concave function that is nowhere below these shares."""
        corners: list[Hull] = []
        for last in map(Hull, range(len(limits)), limits):
            while len(corners) > 1 and _slope(*corners[-2:]) <= _slope(corners[-1], last):
                corners.pop()
            corners.append(last)
        return corners

    @classmethod
    def losses(cls, limits: Sequence[float]) -> list[float]:
        """What each sample takes of the largest share, by the hull; ascending."""
        return [
            -_slope(first, last)
            for first, last in pairwise(cls.hull(limits))
            for _ in range(last.samples - first.samples)
        ]


def _slope(first: Hull, last: Hull) -> float:
    return (last.share - first.share) / (last.samples - first.samples)
