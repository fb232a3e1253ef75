"""Batches and shares together, under given caps: what is cheapest when memory is left aside.

Batches depend on the shares only through what travels at a meeting, one or two numbers. Where
ranks meet once a step, few splits are of interest, and each has its own best shares. Where they
meet at every pass, the traffic is searched by boxes: within one, what the best meetings cost is
bounded from below by a concave function of the traffic (each size of meeting by its tangent, and
the minimum of straight lines is concave), so its values at the corners make a linear programme
with the shares. A box whose bound is as good as a known step is done; others are cut where the
programme's answer lies, or where the cost of a meeting bends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, count
from typing import NamedTuple

from poplar.planner.batch_allocation import EveryPass, MicroBatches, OncePerStep, Split, Workload
from poplar.planner.cost_model import CommunicationSeconds, Exposure, StageCosts
from poplar.planner.shard_allocation import Corner, Shared, ShareProblem

TOLERANCE = 1e-10
"""Relative difference below which two steps are equally fast."""
_MOST_BOXES = 64
"""Of one search; beyond, the bound is what the boxes that are left allow."""


class Relaxed(NamedTuple):
    """The best batches and shares under the caps, which may need more memory than there is."""

    bound: float
    """No step under these caps and bounds on the shares is faster."""
    micro_batches: MicroBatches
    shares: tuple[float, ...]


def relaxed(
    costs: StageCosts,
    workload: Workload,
    caps: tuple[int, ...],
    problem: ShareProblem,
    known: float,
) -> Relaxed | None:
    """The fastest step with these caps and these bounds on the shares; None: not below `known`."""
    if costs.synchronizes_every_pass:
        return _EveryPassSearch(costs, workload.every_pass(caps), problem, known).run()
    return _once_per_step(costs, workload.once_per_step(caps), problem, known)


def _once_per_step(
    costs: StageCosts, once: OncePerStep, problem: ShareProblem, known: float
) -> Relaxed | None:
    communication, tail = problem.least_communication(), problem.least_tail()
    best = None
    split: Split | None = once.first()
    while split is not None:
        if costs.synchronization_seconds(split.synchronization, communication) + tail < known * (
            1.0 - TOLERANCE
        ):
            shared = problem.cheapest([split.synchronization])
            if shared.seconds < known * (1.0 - TOLERANCE):
                known = shared.seconds
                best = Relaxed(known, split.micro_batches, shared.shares)
        split = once.following(split, communication, known - tail)
    return best


class _Box(NamedTuple):
    """Traffic between two corners, and how fast a step with such traffic can be at best."""

    bound: float
    number: int
    least: CommunicationSeconds
    most: CommunicationSeconds
    shared: Shared
    synchronizations: tuple[int, ...]
    """The cheapest where the least travels."""


class _EveryPassSearch:
    """Best-first search over boxes of traffic."""

    def __init__(
        self, costs: StageCosts, every: EveryPass, problem: ShareProblem, known: float
    ) -> None:
        self._costs = costs
        self._every = every
        self._problem = problem
        self._known = known
        self._best: Relaxed | None = None
        self._boxes: list[_Box] = []
        self._number = count()
        self._tried: set[tuple[int, ...]] = set()

    def run(self) -> Relaxed | None:
        self._add(self._problem.least_communication(), self._problem.most_communication())
        closed = self._known
        for _ in range(_MOST_BOXES):
            if not self._boxes or self._boxes[0].bound >= self._known * (1.0 - TOLERANCE):
                break
            box = heapq.heappop(self._boxes)
            parts = self._cut(box)
            if not parts:
                closed = min(closed, box.bound)
            for least, most in parts:
                self._add(least, most)
        if self._best is None and self._boxes:
            box = self._boxes[0]
            return Relaxed(
                box.bound, self._every.micro_batches(box.synchronizations), box.shared.shares
            )
        if self._best is None:
            return None
        bound = min([self._best.bound, closed, *(box.bound for box in self._boxes[:1])])
        return self._best._replace(bound=bound)

    def _add(self, least: CommunicationSeconds, most: CommunicationSeconds) -> None:
        seconds = self._every.seconds(least)
        lowest, synchronizations = self._every.cheapest(*seconds)
        self._try(synchronizations)
        corners = [Corner(least, lowest)]
        slopes = self._every.slopes(least)
        for corner in _other_corners(least, most):
            tangents = [
                _tangent(own, steep, least, corner)
                for own, steep in zip(seconds, slopes, strict=True)
            ]
            corners.append(Corner(corner, self._every.cheapest(*tangents)[0]))
        shared = self._problem.between(corners)
        if shared is None or shared.seconds >= self._known * (1.0 - TOLERANCE):
            return
        self._try(self._every.at(self._costs.communication(shared.shares))[1])
        box = _Box(shared.seconds, next(self._number), least, most, shared, synchronizations)
        heapq.heappush(self._boxes, box)

    def _try(self, synchronizations: tuple[int, ...]) -> None:
        """The best shares for these meetings, then the best meetings for those, and so on."""
        while synchronizations not in self._tried:
            self._tried.add(synchronizations)
            shared = self._problem.cheapest(
                [self._every.synchronization(m) for m in synchronizations]
            )
            if shared.seconds < self._known:
                self._known = shared.seconds
                batches = self._every.micro_batches(synchronizations)
                self._best = Relaxed(shared.seconds, batches, shared.shares)
            synchronizations = self._every.at(self._costs.communication(shared.shares))[1]

    def _cut(self, box: _Box) -> list[tuple[CommunicationSeconds, CommunicationSeconds]]:
        """Two boxes that together are this one; none if it is too small to be cut."""
        at = self._costs.communication(box.shared.shares)
        for part, place in (*self._kinks(box), *enumerate(at)):
            low, high = box.least[part], box.most[part]
            margin = 1e-9 * high
            if low + margin < place < high - margin:
                return _halves(box, part, place)
        widest = max((0, 1), key=lambda part: box.most[part] - box.least[part])
        low, high = box.least[widest], box.most[widest]
        if high - low <= 1e-9 * high:
            return []
        return _halves(box, widest, 0.5 * (low + high))

    def _kinks(self, box: _Box) -> list[tuple[int, float]]:
        """Where the cost of this box's meetings bends: which part of the traffic, and its seconds;
        nearest to the programme's answer first.
        """
        at = self._costs.communication(box.shared.shares)
        kinks = set()
        usual, dearest = self._costs.split_dearest(self._every.at(at)[1])
        for size, is_dearest in {(size, False) for size in usual} | {(dearest, True)}:
            synchronization = self._every.synchronization(size)
            exposures = self._costs.exposures(synchronization, dearest=is_dearest)
            kinks |= {kink for pair in combinations(exposures, 2) for kink in _crossings(*pair, at)}
        return sorted(kinks, key=lambda kink: (abs(kink[1] - at[kink[0]]), kink))


def _crossings(
    one: Exposure, other: Exposure, at: CommunicationSeconds
) -> Iterator[tuple[int, float]]:
    """Where two lines are equal: along each part of the traffic, the other part as it is."""
    apart = one.at(at) - other.at(at)
    for part in (0, 1):
        steeper = one[part] - other[part]
        if steeper:
            yield part, at[part] - apart / steeper


def _tangent(
    seconds: Sequence[float],
    slopes: Sequence[CommunicationSeconds],
    least: CommunicationSeconds,
    corner: CommunicationSeconds,
) -> list[float]:
    """What meetings cost at least at a corner: along the slopes that they have at the least."""
    gather, reduce = corner.gather - least.gather, corner.reduce - least.reduce
    bounds = [
        at_least + slope.gather * gather + slope.reduce * reduce
        for at_least, slope in zip(seconds, slopes, strict=True)
    ]
    # A larger meeting may have a smaller slope; no meeting costs less than a smaller one.
    return list(accumulate(reversed(bounds), min))[::-1]


def _other_corners(
    least: CommunicationSeconds, most: CommunicationSeconds
) -> list[CommunicationSeconds]:
    corners = {
        CommunicationSeconds(gather, reduce)
        for gather in (least.gather, most.gather)
        for reduce in (least.reduce, most.reduce)
    }
    return sorted(corners - {least})


def _halves(
    box: _Box, part: int, place: float
) -> list[tuple[CommunicationSeconds, CommunicationSeconds]]:
    middle = [
        corner._replace(**{CommunicationSeconds._fields[part]: place})
        for corner in (box.most, box.least)
    ]
    return [(box.least, middle[0]), (middle[1], box.most)]
