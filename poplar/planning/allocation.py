"""The cheapest batches under given caps and given traffic: one solver per shape of a step.

A cap is the largest micro-batch that a rank may use. `EveryPass` serves steps whose every pass
ends in a meeting: a meeting of `m` samples lasts as long as the `m`-th fastest of all ranks'
samples, and a step is the cheapest way to write the global batch as a sum of meetings.
`OncePerStep` serves steps with one meeting: each rank's samples are cut into its own cheapest
passes, and what has to be small is the end of the last rank (`T`) and, where communication hides,
the moment from which all ranks have gradients to offer (`F`).

Both are exact on the measured curves; neither knows of memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import add
from typing import NamedTuple

from poplar.planning.cost_model import Meeting, StageCosts, Traffic

MicroBatches = tuple[tuple[int, ...], ...]
_ROUNDING = 1e-12
"""Of a sum of passes, relative: moments that are closer are one."""


class Workload:
    """The samples of a step at one stage: solvers for any caps, which share what they can."""

    def __init__(self, costs: StageCosts, global_batch: int) -> None:
        self._costs = costs
        self._global_batch = global_batch
        kinds = [(device.points, device.pass_overhead_seconds) for device in costs.cluster.devices]
        self._kinds = [kinds.index(kind) for kind in kinds]
        self._passes = cache(self._passes_of)
        self._cuts = cache(self._cuts_of)
        self.every_pass = cache(self._every_pass)
        self.once_per_step = cache(self._once_per_step)

    def _every_pass(self, caps: tuple[int, ...]) -> EveryPass:
        passes = [
            self._passes(kind)[: cap + 1] for kind, cap in zip(self._kinds, caps, strict=True)
        ]
        return EveryPass(self._costs, passes, self._global_batch)

    def _once_per_step(self, caps: tuple[int, ...]) -> OncePerStep:
        cuts = [self._cuts(kind, cap) for kind, cap in zip(self._kinds, caps, strict=True)]
        return OncePerStep(self._costs, cuts, self._global_batch)

    def _passes_of(self, rank: int) -> list[float]:
        """Seconds of a pass of 0, 1, 2, ... samples."""
        most = min(self._global_batch, self._costs.cluster.devices[rank].max_batch)
        return [self._costs.pass_seconds(rank, batch) for batch in range(most + 1)]

    def _cuts_of(self, rank: int, cap: int) -> RankCuts:
        return RankCuts(self._passes(rank)[: cap + 1], self._global_batch, self._costs.late)


class EveryPass:
    """Batches of a step in which ranks meet at every pass."""

    def __init__(
        self, costs: StageCosts, passes: Sequence[Sequence[float]], global_batch: int
    ) -> None:
        """`passes[r][b]`: seconds of a pass of `b` samples on rank `r`, up to its cap."""
        samples = [(seconds, rank) for rank, own in enumerate(passes) for seconds in own[1:]]
        samples.sort()
        self._costs = costs
        self._ranks = [rank for _, rank in samples[:global_batch]]
        self._global_batch = global_batch
        self.latest = [seconds for seconds, _ in samples[:global_batch]]
        """`latest[m - 1]`: the least time in which the ranks together compute `m` samples."""

    def meeting(self, samples: int) -> Meeting:
        """A meeting of this many samples."""
        latest = self.latest[samples - 1]
        return Meeting(latest, latest - self._costs.late * latest)

    def cheapest(self, seconds: Sequence[float]) -> tuple[float, tuple[int, ...]]:
        """The cheapest meetings that hold the global batch, smaller ones first.

        Args:
            seconds: `seconds[m - 1]` is what a meeting of `m` samples costs; non-decreasing.
        """
        return cheapest_sum(seconds, self._global_batch)

    def at(self, traffic: Traffic) -> tuple[float, tuple[int, ...]]:
        """The cheapest meetings when this travels at each of them."""
        return self.cheapest(self.seconds(traffic))

    def seconds(self, traffic: Traffic) -> list[float]:
        """What a meeting of 1, 2, ... samples costs when this travels."""
        meetings = range(1, len(self.latest) + 1)
        return [self._costs.meeting_seconds(self.meeting(m), traffic) for m in meetings]

    def micro_batches(self, meetings: Sequence[int]) -> MicroBatches:
        """Who computes what: at every meeting each rank takes what it does fastest."""
        ranks = self._costs.cluster.world_size
        columns = []
        for samples in meetings:
            column = [0] * ranks
            for rank in self._ranks[:samples]:
                column[rank] += 1
            columns.append(column)
        return tuple(zip(*columns, strict=True))


class Split(NamedTuple):
    """Samples per rank of a step with one meeting, and the bounds that its passes keep."""

    meeting: Meeting
    micro_batches: MicroBatches


class OncePerStep:
    """Batches of a step with one meeting.

    The cheapest split is one that no other beats in both `T` and `F`: `first` and `following` walk
    along those.
    """

    def __init__(self, costs: StageCosts, cuts: Sequence[RankCuts], global_batch: int) -> None:
        self._costs = costs
        self._global_batch = global_batch
        self._ranks = cuts

    def at(self, traffic: Traffic) -> tuple[float, Split]:
        """The cheapest split when this travels at the meeting."""
        split: Split | None = self.first()
        best = math.inf
        while split is not None:
            seconds = self._costs.meeting_seconds(split.meeting, traffic)
            if seconds < best:
                best, found = seconds, split
            split = self.following(split, traffic, best)
        return best, found

    def first(self) -> Split:
        """The split with the least `T`, and of those the one with the least `F`."""
        tops = [cuts.most_samples for cuts in self._ranks]
        ends = [cuts.seconds.__getitem__ for cuts in self._ranks]
        latest = smallest(ends, tops, self._global_batch)
        return self._split(latest, latest)

    def following(self, split: Split, traffic: Traffic, below: float) -> Split | None:
        """The next split with a larger `T` and a smaller `F`, or None.

        Args:
            split: the one before.
            traffic: the least that travels at the meeting.
            below: only splits whose meeting may be shorter than this are of interest.
        """
        if not self._costs.hides:
            return None
        target = min(
            self._reducible_for(below, split.meeting.latest, traffic),
            split.meeting.reducible - _ROUNDING * split.meeting.latest,
        )
        if target <= 0.0:
            return None
        tops = [cuts.most_samples for cuts in self._ranks]
        ends = [partial(cuts.least_end, reducible=target) for cuts in self._ranks]
        latest = smallest(ends, tops, self._global_batch)
        if latest >= self._latest_for(below, traffic):
            return None
        return self._split(latest, target)

    def _reducible_for(self, limit: float, latest: float, traffic: Traffic) -> float:
        """The `F` under which a meeting with this `T` or a later one may be within `limit`."""
        overlap = self._costs.cluster.overlap
        spare = limit - traffic.backward - self._costs.meeting_residual - (1.0 - overlap) * latest
        return spare / overlap

    def _latest_for(self, limit: float, traffic: Traffic) -> float:
        """The `T` above which no meeting is within `limit`."""
        hidden = self._costs.cluster.overlap * self._costs.hideable
        exposed = traffic.backward * (1.0 - hidden) + self._costs.meeting_residual
        return limit - max(0.0, exposed)

    def _split(self, latest: float, reducible: float) -> Split:
        """The global batch, dealt out with this `T` and the least `F`, which is in `reducible`."""
        tops = [cuts.most(latest) for cuts in self._ranks]
        if self._costs.hides:
            starts = [partial(cuts.least_reducible, end=latest) for cuts in self._ranks]
            reducible = smallest(starts, tops, self._global_batch)
            tops = [
                bisect_right(range(1, top + 1), reducible, key=start)
                for start, top in zip(starts, tops, strict=True)
            ]
        left, batches = self._global_batch, []
        for cuts, top in zip(self._ranks, tops, strict=True):
            samples = min(top, left)
            left -= samples
            batches.append(cuts.cut(samples, latest, reducible))
        micro_batches = tuple(batches)
        (meeting,) = self._costs.meetings(micro_batches)
        return Split(meeting, micro_batches)


class Cut(NamedTuple):
    """One way to run some samples on one rank."""

    end: float
    reducible: float
    last: int
    """Samples of the last pass; those before it are cut in the cheapest way."""


class RankCuts:
    """How one rank runs any number of samples in passes of limited size."""

    def __init__(self, passes: Sequence[float], global_batch: int, late: float) -> None:
        """Cut into passes of which one of `b` samples takes `passes[b]` seconds.

        Args:
            passes: up to the largest pass that is allowed, from 0 samples on.
            global_batch: most samples of this rank.
            late: the part of a last pass in which it has gradients to offer.
        """
        cap = len(passes) - 1
        self._late = late
        self._passes = passes
        self.seconds = [0.0]
        """`seconds[n]`: the least time for `n` samples; non-decreasing. Ends at 0 if none fits."""
        self._last = [0]
        descending = passes[:0:-1]
        for samples in range(1, global_batch + 1 if cap else 1):
            width = min(cap, samples)
            before = self.seconds[samples - width : samples]
            ends = list(map(add, descending[cap - width :], before))
            end = min(ends)
            self.seconds.append(end)
            self._last.append(width - ends.index(end))
        self._cuts = cache(self._cuts_of)

    @property
    def most_samples(self) -> int:
        """What this rank may run at all: the global batch, or nothing."""
        return len(self.seconds) - 1

    def most(self, latest: float) -> int:
        """The most samples that are computed by `latest`."""
        return bisect_right(self.seconds, latest) - 1

    def least_end(self, samples: int, reducible: float) -> float:
        """The least time for samples whose last pass offers its gradients by `reducible`."""
        for cut in self._cuts(samples):
            if cut.reducible <= reducible:
                return cut.end
        return math.inf

    def least_reducible(self, samples: int, end: float) -> float:
        """The least moment at which samples that are computed by `end` offer their gradients."""
        least = math.inf
        for cut in self._cuts(samples):
            if cut.end > end:
                break
            least = cut.reducible
        return least

    def cut(self, samples: int, latest: float, reducible: float) -> tuple[int, ...]:
        """Passes of `samples` within these bounds, smaller ones first."""
        if reducible >= latest or samples == 0:
            return tuple(sorted(self._cheapest(samples)))
        for cut in self._cuts(samples):
            if cut.reducible <= reducible:
                return (*sorted(self._cheapest(samples - cut.last)), cut.last)
        raise ValueError(f"no cut of {samples} samples offers its gradients by {reducible}")

    def _cuts_of(self, samples: int) -> tuple[Cut, ...]:
        """The ways to run `samples` of which none beats another in both its times."""
        cuts = []
        for last in range(1, min(len(self._passes) - 1, samples) + 1):
            end = self._passes[last] + self.seconds[samples - last]
            cuts.append(Cut(end, end - self._late * self._passes[last], last))
        cuts.sort()
        best, kept = float("inf"), []
        for cut in cuts:
            if cut.reducible < best:
                best = cut.reducible
                kept.append(cut)
        return tuple(kept)

    def _cheapest(self, samples: int) -> Iterator[int]:
        while samples:
            yield self._last[samples]
            samples -= self._last[samples]


def cheapest_sum(costs: Sequence[float], total: int) -> tuple[float, tuple[int, ...]]:
    """The cheapest way to write `total` as a sum of parts, smaller parts first.

    Args:
        costs: `costs[m - 1]` is what a part of `m` costs; at least one, non-negative.
        total: at least 1.

    A part of `m` costs at least `m` times the best rate. What it costs beyond is waste, and a sum
    that wastes more than a known one is none of the cheapest: few parts and few partial sums
    remain, and the dynamic programme runs over those.
    """
    sizes = range(1, min(len(costs), total) + 1)
    rate = min(costs[m - 1] / m for m in sizes)
    known = _cheapest_even_sum(costs, total)
    most_waste = known - rate * total + 1e-12 * known
    wastes = sorted((costs[m - 1] - rate * m, m) for m in sizes)
    parts = [(waste, m) for waste, m in wastes if waste <= most_waste]
    wasted, last = [math.inf] * (total + 1), [0] * (total + 1)
    wasted[0] = 0.0
    for n in range(total):
        if wasted[n] > most_waste:
            continue
        left = total - n
        for waste, m in parts:
            together = wasted[n] + waste
            if together > most_waste:
                break
            if m <= left and together < wasted[n + m]:
                wasted[n + m], last[n + m] = together, m
    found = []
    while total:
        found.append(last[total])
        total -= found[-1]
    return math.fsum(costs[m - 1] for m in found), tuple(sorted(found))


def _cheapest_even_sum(costs: Sequence[float], total: int) -> float:
    """The cheapest sum of parts that differ by at most 1."""
    cheapest = math.inf
    for count in range(-(-total // len(costs)), total + 1):
        size, larger = divmod(total, count)
        more = larger * costs[size] if larger else 0.0
        cheapest = min(cheapest, more + (count - larger) * costs[size - 1])
    return cheapest


def smallest(values: Sequence[Callable[[int], float]], tops: Sequence[int], count: int) -> float:
    """The `count`-th smallest of several ascending sequences together; infinite if they are fewer.

    Args:
        values: by sequence, its `i`-th value, counted from 1; non-decreasing.
        tops: by sequence, how many values it has.
        count: at least 1.
    """
    low, high, found = [0] * len(tops), list(tops), math.inf
    if sum(tops) < count:
        return found
    while True:
        widest = max(range(len(low)), key=lambda s: high[s] - low[s])
        if low[widest] == high[widest]:
            return found
        pivot = values[widest]((low[widest] + high[widest] + 1) // 2)
        windows = [range(a + 1, b + 1) for a, b in zip(low, high, strict=True)]
        counts = [
            a + bisect_right(window, pivot, key=value)
            for a, window, value in zip(low, windows, values, strict=True)
        ]
        if sum(counts) < count:
            low = counts
            continue
        found = pivot
        high = [
            a + bisect_left(window, pivot, key=value)
            for a, window, value in zip(low, windows, values, strict=True)
        ]
