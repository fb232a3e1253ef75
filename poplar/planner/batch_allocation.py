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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from poplar import _core
from poplar.planner.cost_model import CommunicationSeconds, StageCosts, Synchronization
from poplar.planner.rank_groups import members

MicroBatches = tuple[tuple[int, ...], ...]
_ROUNDING = 1e-12
"""Of a sum of passes, relative: moments that are closer are one."""


class Workload:
    """The samples of a step at one stage: solvers for any caps, which share what they can."""

    def __init__(self, costs: StageCosts, global_batch: int) -> None:
        self._costs = costs
        self._global_batch = global_batch
        self._kinds = costs.cluster.device_kinds
        self._first = [ranks[0] for ranks in members(self._kinds)]
        """The first rank of each kind."""
        self._passes = cache(self._passes_of)
        self._cuts = cache(self._cuts_of)
        self.every_pass = cache(self._every_pass)
        self.once_per_step = cache(self._once_per_step)

    def _every_pass(self, caps: tuple[int, ...]) -> EveryPass:
        groups = [
            (ranks, self._passes(self._kinds[ranks[0]])[: caps[ranks[0]] + 1])
            for ranks in self._alike(caps)
        ]
        return EveryPass(self._costs, groups, self._global_batch)

    def _once_per_step(self, caps: tuple[int, ...]) -> OncePerStep:
        groups = [
            (ranks, self._cuts(self._kinds[ranks[0]], caps[ranks[0]]))
            for ranks in self._alike(caps)
        ]
        return OncePerStep(self._costs, groups, self._global_batch)

    def _alike(self, caps: tuple[int, ...]) -> list[list[int]]:
        """Ranks of the same kind and cap."""
        return members(zip(self._kinds, caps, strict=True))

    def _passes_of(self, kind: int) -> list[float]:
        """Seconds of a pass of 0, 1, 2, ... samples."""
        rank = self._first[kind]
        most = min(self._global_batch, self._costs.cluster.devices[rank].max_batch)
        return [self._costs.pass_seconds(rank, batch) for batch in range(most + 1)]

    def _cuts_of(self, kind: int, cap: int) -> RankCuts:
        return RankCuts(
            self._passes(kind)[: cap + 1], self._global_batch, self._costs.reducible_fraction
        )


class EveryPass:
    """Batches of a step in which ranks meet at every pass.

    A meeting lasts as long as the last of its samples, so of all meetings that last equally long
    only the largest is of interest: there are no more of those than different samples.
    """

    def __init__(
        self,
        costs: StageCosts,
        groups: Sequence[tuple[Sequence[int], Sequence[float]]],
        global_batch: int,
    ) -> None:
        """Groups of equal ranks: their ranks, and the seconds of a pass of 0, 1, ... samples."""
        samples = [(seconds, group) for group, (_, own) in enumerate(groups) for seconds in own[1:]]
        samples.sort()
        self._costs = costs
        self._groups = groups
        self._global_batch = global_batch
        self._order: list[int] = []
        """Groups whose ranks take one more sample each, in this order."""
        self._reached: list[int] = []
        """Samples that all ranks together have then."""
        self.synchronizations: list[Synchronization] = []
        """That differ, shortest first."""
        self.sizes: list[int] = []
        """How many samples each of them holds at most."""
        reached = 0
        for latest, group in samples:
            reached += len(groups[group][0])
            self._order.append(group)
            self._reached.append(reached)
            if not self.synchronizations or latest > self.synchronizations[-1].latest:
                self.synchronizations.append(
                    Synchronization(latest, latest - costs.reducible_fraction * latest)
                )
                self.sizes.append(reached)
            else:
                self.sizes[-1] = reached
            if reached >= global_batch:
                self.sizes[-1] = global_batch
                break

    def synchronization(self, samples: int) -> Synchronization:
        """The shortest meeting that holds this many samples."""
        return self.synchronizations[bisect_left(self.sizes, samples)]

    def cheapest(
        self, usual: Sequence[float], dearest: Sequence[float]
    ) -> tuple[float, tuple[int, ...]]:
        """The cheapest meetings that hold the global batch, in order: smaller ones first, but for
        the dearest.

        Args:
            usual: what each of `meetings` costs; non-decreasing.
            dearest: what it costs as the dearest of a step; no less.
        """
        parts = _core.cheapest_cover(self.sizes, usual, dearest, self._global_batch)
        cost, (*others, one) = parts
        return cost, self._costs.join_dearest(others, one)

    def at(self, communication: CommunicationSeconds) -> tuple[float, tuple[int, ...]]:
        """The cheapest meetings when this travels at each of them."""
        return self.cheapest(*self.seconds(communication))

    def seconds(self, communication: CommunicationSeconds) -> tuple[list[float], list[float]]:
        """What each of `meetings` costs when this travels: as a usual one, and as the dearest."""
        costs = self._costs
        dearest = [
            costs.synchronization_seconds(synchronization, communication)
            for synchronization in self.synchronizations
        ]
        if not costs.synchronizations_differ:
            return dearest, dearest
        return [
            costs.synchronization_seconds(m, communication, dearest=False)
            for m in self.synchronizations
        ], dearest

    def slopes(
        self, communication: CommunicationSeconds
    ) -> tuple[list[CommunicationSeconds], list[CommunicationSeconds]]:
        """By how much each of `seconds` grows with the traffic."""
        costs = self._costs
        dearest = [
            costs.slopes(synchronization, communication)
            for synchronization in self.synchronizations
        ]
        if not costs.synchronizations_differ:
            return dearest, dearest
        return [
            costs.slopes(m, communication, dearest=False) for m in self.synchronizations
        ], dearest

    def micro_batches(self, synchronizations: Sequence[int]) -> MicroBatches:
        """Who computes what: at every meeting each rank takes what it does fastest."""
        columns = {samples: self._column(samples) for samples in set(synchronizations)}
        return tuple(zip(*(columns[samples] for samples in synchronizations), strict=True))

    def _column(self, samples: int) -> list[int]:
        """By rank, its part of a meeting of this many samples."""
        last = bisect_left(self._reached, samples)
        column = [0] * self._costs.cluster.world_size
        for group, taken in Counter(self._order[:last]).items():
            for rank in self._groups[group][0]:
                column[rank] = taken
        left = samples - (self._reached[last - 1] if last else 0)
        for rank in self._groups[self._order[last]][0][:left]:
            column[rank] += 1
        return column


class Split(NamedTuple):
    """Samples per rank of a step with one meeting, and the bounds that its passes keep."""

    synchronization: Synchronization
    micro_batches: MicroBatches


class OncePerStep:
    """Batches of a step with one meeting.

    The cheapest split is one that no other beats in both `T` and `F`: `first` and `following` walk
    along those.
    """

    def __init__(
        self,
        costs: StageCosts,
        groups: Sequence[tuple[Sequence[int], RankCuts]],
        global_batch: int,
    ) -> None:
        """Groups of equal ranks: their ranks, and how each of them runs its samples."""
        self._costs = costs
        self._global_batch = global_batch
        self._ranks = [ranks for ranks, _ in groups]
        self._cuts = [cuts for _, cuts in groups]
        self._counts = [len(ranks) for ranks in self._ranks]

    def at(self, communication: CommunicationSeconds) -> tuple[float, Split]:
        """The cheapest split when this travels at the meeting."""
        split: Split | None = self.first()
        best = math.inf
        while split is not None:
            seconds = self._costs.synchronization_seconds(split.synchronization, communication)
            if seconds < best:
                best, found = seconds, split
            split = self.following(split, communication, best)
        return best, found

    def first(self) -> Split:
        """The split with the least `T`, and of those the one with the least `F`."""
        tops = [cuts.most_samples for cuts in self._cuts]
        ends = [cuts.seconds.__getitem__ for cuts in self._cuts]
        latest = smallest(ends, tops, self._counts, self._global_batch)
        return self._split(latest, latest)

    def following(
        self, split: Split, communication: CommunicationSeconds, below: float
    ) -> Split | None:
        """The next split with a larger `T` and a smaller `F`, or None.

        Args:
            split: the one before.
            traffic: the least that travels at the meeting.
            below: only splits whose meeting may be shorter than this are of interest.
        """
        if not self._costs.overlaps:
            return None
        target = min(
            self._reducible_for(below, communication),
            split.synchronization.reducible - _ROUNDING * split.synchronization.latest,
        )
        if target <= 0.0:
            return None
        tops = [cuts.most_samples for cuts in self._cuts]
        ends = [partial(cuts.least_end, reducible=target) for cuts in self._cuts]
        latest = smallest(ends, tops, self._counts, self._global_batch)
        if latest >= self._latest_for(below, communication):
            return None
        return self._split(latest, target)

    def _reducible_for(self, limit: float, communication: CommunicationSeconds) -> float:
        """The `F` above which no meeting is within `limit`: everything travels after it."""
        return limit - self._travels(communication)

    def _latest_for(self, limit: float, communication: CommunicationSeconds) -> float:
        """The `T` above which no meeting is within `limit`: the last unit travels after it."""
        way = self._costs.schedule
        behind = way.gathers_under_backward * communication.gather
        behind += way.reductions_under_backward * communication.reduce
        exposed = self._travels(communication) - self._costs.cluster.overlap * behind
        return limit - max(0.0, exposed)

    def _travels(self, communication: CommunicationSeconds) -> float:
        gathered = self._costs.schedule.gathers * communication.gather
        return gathered + communication.reduce + self._costs.synchronization_residual

    def _split(self, latest: float, reducible: float) -> Split:
        """The global batch, dealt out with this `T` and the least `F`, which is in `reducible`."""
        tops = [cuts.most(latest) for cuts in self._cuts]
        if self._costs.overlaps:
            starts = [partial(cuts.least_reducible, end=latest) for cuts in self._cuts]
            reducible = smallest(starts, tops, self._counts, self._global_batch)
            tops = [
                bisect_right(range(1, top + 1), reducible, key=start)
                for start, top in zip(starts, tops, strict=True)
            ]
        batches: list[tuple[int, ...]] = [()] * self._costs.cluster.world_size
        kinds = []
        left = self._global_batch
        for ranks, cuts, top in zip(self._ranks, self._cuts, tops, strict=True):
            full, rest = divmod(min(left, top * len(ranks)), top) if top else (0, 0)
            left -= full * top + rest
            for samples, some in ((top, ranks[:full]), (rest, ranks[full : full + 1])):
                if samples and some:
                    cut = cuts.cut(samples, latest, reducible)
                    kinds.append((some[0], cut))
                    for rank in some:
                        batches[rank] = cut
        return Split(self._costs.synchronization(kinds), tuple(batches))


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
        self._late = late
        self._passes = passes
        self.seconds, self._last = _core.cheapest_passes(passes, global_batch)
        """`seconds[n]`: the least time for `n` samples; non-decreasing. Ends at 0 if none fits."""
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


def smallest(
    values: Sequence[Callable[[int], float]],
    tops: Sequence[int],
    copies: Sequence[int],
    count: int,
) -> float:
    """The `count`-th smallest of several ascending sequences together; infinite if they are fewer.

    Args:
        values: by sequence, its `i`-th value, counted from 1; non-decreasing.
        tops: by sequence, how many values it has.
        copies: by sequence, how many there are that are equal to it, itself included.
        count: at least 1.
    """
    low, high, found = [0] * len(tops), list(tops), math.inf
    if _all(tops, copies) < count:
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
        if _all(counts, copies) < count:
            low = counts
            continue
        found = pivot
        high = [
            a + bisect_left(window, pivot, key=value)
            for a, window, value in zip(low, windows, values, strict=True)
        ]


def _all(counts: Sequence[int], copies: Sequence[int]) -> int:
    return sum(count * many for count, many in zip(counts, copies, strict=True))
