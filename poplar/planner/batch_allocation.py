"""The best batches when every rank's largest micro-batch (its cap) and the communication are given.

`SynchronizedPasses` solves steps in which all ranks synchronize after every pass, and
`IndependentPasses` solves steps with one synchronization. Both are exact on the measured curves;
memory and shares are not considered here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, product, starmap
from typing import NamedTuple, TypeVar

from poplar import _core
from poplar.planner.communication_schedule import (
    CommunicationSeconds,
    Exposure,
    Synchronization,
)
from poplar.planner.cost_model import StageCosts
from poplar.planner.rank_groups import group_equal, map_distinct

T = TypeVar("T")
MicroBatches = tuple[tuple[int, ...], ...]
_ROUNDING = 1e-12
"""Relative difference below which two times are equal."""


class BatchAllocator:
    """Solvers for one stage and global batch, for any caps; they share their tables."""

    def __init__(self, costs: StageCosts, global_batch: int) -> None:
        def seconds(rank: int) -> list[float]:
            largest = min(global_batch, costs.cluster.devices[rank].max_batch)
            return [costs.pass_seconds(rank, batch) for batch in range(largest + 1)]

        self._costs = costs
        self._global_batch = global_batch
        self._groups = costs.cluster.device_group_indices
        self._pass_seconds = dict(zip(self._groups, costs.by_rank(seconds), strict=True))
        """By device group, of passes of 0, 1, 2, ... samples."""
        self._rank_passes = cache(self._rank_passes_of)
        self.under = cache(self._under)
        """The solver under these caps."""

    def _under(self, caps: tuple[int, ...]) -> SynchronizedPasses | IndependentPasses:
        keys = list(zip(self._groups, caps, strict=True))
        equal = [(ranks, *keys[ranks[0]]) for ranks in group_equal(keys)]
        if self._costs.synchronizes_every_pass:
            passes = [(ranks, self._pass_seconds[group][: cap + 1]) for ranks, group, cap in equal]
            return SynchronizedPasses(self._costs, passes, self._global_batch)
        tables = [(ranks, self._rank_passes(group, cap)) for ranks, group, cap in equal]
        return IndependentPasses(self._costs, tables, self._global_batch)

    def _rank_passes_of(self, group: int, cap: int) -> RankPasses:
        passes = self._pass_seconds[group][: cap + 1]
        return RankPasses(passes, self._global_batch, self._costs.reducible_fraction)


class SynchronizedPasses:
    """Batches of a step whose passes all end in a synchronization.

    A pass of `m` samples, over all ranks, lasts at least as long as the `m`-th fastest of all
    samples that any rank can add. Of passes that last equally long only the largest matters, and a
    step is the cheapest way to write the global batch as a sum of those.
    """

    def __init__(
        self,
        costs: StageCosts,
        groups: Sequence[tuple[Sequence[int], Sequence[float]]],
        global_batch: int,
    ) -> None:
        """Groups of equal ranks: their ranks, and the seconds of a pass of 0, 1, ... samples."""
        self._costs = costs
        self._groups = groups
        self._global_batch = global_batch
        self._order: list[int] = []
        """Groups whose ranks take one more sample each, in this order."""
        self._totals: list[int] = []
        """Samples of all ranks together after each entry of `_order`."""
        self.synchronizations: list[Synchronization] = []
        """One for each different duration of a pass, shortest first."""
        self.sizes: list[int] = []
        """How many samples each of these passes holds at most."""
        total = 0
        samples = [(seconds, group) for group, (_, own) in enumerate(groups) for seconds in own[1:]]
        for latest, group in sorted(samples):
            total += len(groups[group][0])
            self._order.append(group)
            self._totals.append(total)
            if not self.synchronizations or latest > self.synchronizations[-1].latest:
                self.synchronizations.append(
                    Synchronization(latest, latest - costs.reducible_fraction * latest)
                )
                self.sizes.append(0)
            self.sizes[-1] = min(total, global_batch)
            if total >= global_batch:
                break

    def cheapest(self, communication: CommunicationSeconds) -> MicroBatches:
        """The batches of the fastest step with this communication."""
        return self.micro_batches(self.cheapest_sizes(communication))

    def cheapest_sizes(self, communication: CommunicationSeconds) -> tuple[int, ...]:
        """The sizes of the passes of the fastest step with this communication, in order."""
        usual, costliest = map_distinct(
            lambda schedule: [
                schedule.seconds(one, communication) for one in self.synchronizations
            ],
            self._costs.schedules,
        )
        (*others, last) = self._cover(usual, costliest)[1]
        return (last, *others) if self._costs.costliest_comes_first else (*others, last)

    def lower_bounds(
        self, least: CommunicationSeconds, most: CommunicationSeconds
    ) -> list[tuple[CommunicationSeconds, float]]:
        """Lower bounds on the step, without its tail, at the corners of a box of communication.

        They are the values of a function that is concave within the box: every synchronization is
        bounded by its tangent at `least`, and the minimum of linear functions is concave.
        """
        tangents = map_distinct(
            lambda schedule: [schedule.tangent(one, least) for one in self.synchronizations],
            self._costs.schedules,
        )
        corners = starmap(CommunicationSeconds, product(*map(set, zip(least, most, strict=True))))
        return [
            (corner, self._cover(*(self._tangents_at(corner, own) for own in tangents))[0])
            for corner in sorted(corners)
        ]

    def _cover(
        self, usual: Sequence[float], costliest: Sequence[float]
    ) -> tuple[float, Sequence[int]]:
        """The cheapest passes that hold the global batch, the most expensive one last."""
        return _core.cheapest_cover(self.sizes, usual, costliest, self._global_batch)

    def _tangents_at(
        self, communication: CommunicationSeconds, tangents: Sequence[Exposure]
    ) -> list[float]:
        """Bounds on the seconds of each of `synchronizations`; non-decreasing."""
        bounds = [
            one.latest + tangent.at(communication)
            for one, tangent in zip(self.synchronizations, tangents, strict=True)
        ]
        # The tangent of a larger synchronization may be flatter, but its seconds are never fewer.
        return list(accumulate(reversed(bounds), min))[::-1]

    def synchronization(self, samples: int) -> Synchronization:
        """The shortest synchronization whose pass holds this many samples."""
        return self.synchronizations[bisect_left(self.sizes, samples)]

    def micro_batches(self, sizes: Sequence[int]) -> MicroBatches:
        """Every rank's part of passes of these sizes."""
        columns = {size: self._column(size) for size in set(sizes)}
        return tuple(zip(*(columns[size] for size in sizes), strict=True))

    def _column(self, size: int) -> list[int]:
        """By rank, its samples in a pass of this size."""
        last = bisect_left(self._totals, size)
        column = [0] * self._costs.cluster.world_size
        for group, samples in Counter(self._order[:last]).items():
            for rank in self._groups[group][0]:
                column[rank] = samples
        left = size - (self._totals[last - 1] if last else 0)
        for rank in self._groups[self._order[last]][0][:left]:
            column[rank] += 1
        return column


class Split(NamedTuple):
    """Batches of a step with one synchronization."""

    synchronization: Synchronization
    micro_batches: MicroBatches


class IndependentPasses:
    """Batches of a step with one synchronization; each rank runs its own passes before it.

    The seconds of a step grow with `latest` and, with overlap, with `reducible`. So only splits
    matter that no other split improves in both.
    """

    def __init__(
        self,
        costs: StageCosts,
        groups: Sequence[tuple[Sequence[int], RankPasses]],
        global_batch: int,
    ) -> None:
        """Groups of equal ranks: their ranks, and how each of them runs its samples."""
        self._costs = costs
        self._global_batch = global_batch
        self._groups = groups

    def cheapest(self, communication: CommunicationSeconds) -> MicroBatches:
        """The batches of the fastest step with this communication."""
        batches: MicroBatches = ()
        best = math.inf
        splits = self.splits(communication, limit=lambda: best)
        for split in splits:
            seconds = self._costs.schedule.seconds(split.synchronization, communication)
            if seconds < best:
                best, batches = seconds, split.micro_batches
        return batches

    def splits(
        self, communication: CommunicationSeconds, limit: Callable[[], float]
    ) -> Iterator[Split]:
        """The splits that matter, with growing `latest` and falling `reducible`.

        Args:
            communication: the least communication of the steps that are compared.
            limit: how many seconds later splits must be below; called before each of them.
        """
        seconds_of = partial(self._costs.schedule.seconds, communication=communication)
        alone = seconds_of(Synchronization(0.0, 0.0))
        most_samples = [len(passes.seconds) - 1 for _, passes in self._groups]
        target = math.inf
        while target > 0.0:
            latest = self._kth_smallest(
                partial(RankPasses.earliest_end, reducible=target), most_samples
            )
            if math.isinf(latest) or seconds_of(Synchronization(latest, 0.0)) >= limit():
                return
            split = self._split(latest, target)
            yield split
            if not self._costs.overlaps:
                return
            # All communication follows `reducible`, so only splits below this are fast enough.
            latest, reducible = split.synchronization
            target = min(limit() - alone, reducible - _ROUNDING * latest)

    def _kth_smallest(
        self, value: Callable[[RankPasses, int], float], limits: Sequence[int]
    ) -> float:
        """The least value up to which the ranks together can run the global batch."""
        values = [partial(value, passes) for _, passes in self._groups]
        copies = [len(ranks) for ranks, _ in self._groups]
        return kth_smallest(values, limits, copies, self._global_batch)

    def _split(self, latest: float, reducible: float) -> Split:
        """The global batch with this `latest` and the least `reducible`, which is at most this."""
        limits = [bisect_right(passes.seconds, latest) - 1 for _, passes in self._groups]
        if self._costs.overlaps:
            start = partial(RankPasses.earliest_reducible, end=latest)
            reducible = self._kth_smallest(start, limits)
            limits = [
                bisect_right(range(1, limit + 1), reducible, key=partial(start, passes))
                for limit, (_, passes) in zip(limits, self._groups, strict=True)
            ]
        batches: list[tuple[int, ...]] = [()] * self._costs.cluster.world_size
        used = []
        left = self._global_batch
        for (ranks, passes), limit in zip(self._groups, limits, strict=True):
            full, rest = divmod(min(left, limit * len(ranks)), limit) if limit else (0, 0)
            left -= full * limit + rest
            for samples, some in ((limit, ranks[:full]), (rest, ranks[full : full + 1])):
                if samples and some:
                    cut = passes.cut(samples, latest, reducible)
                    used.append((some[0], cut))
                    for rank in some:
                        batches[rank] = cut
        return Split(self._costs.synchronization(used), tuple(batches))


class Cut(NamedTuple):
    """One way to run some samples on one rank."""

    end: float
    reducible: float
    last: int
    """Samples of the last pass; those before it are cut in the cheapest way."""


class RankPasses:
    """How one rank runs any number of samples in passes of limited size."""

    def __init__(
        self, pass_seconds: Sequence[float], global_batch: int, reducible_fraction: float
    ) -> None:
        """Tables for up to `global_batch` samples.

        Args:
            pass_seconds: of passes of 0, 1, ... samples, up to the largest allowed pass.
            global_batch: most samples of this rank.
            reducible_fraction: the part of a pass, up to its end, in which gradients are reduced.
        """
        self._pass_seconds = pass_seconds
        self._reducible_fraction = reducible_fraction
        self.seconds, self._last = _core.cheapest_passes(pass_seconds, global_batch)
        """`seconds[n]`: the least time for `n` samples, non-decreasing; only 0 if no pass fits."""
        self._cuts = cache(self._cuts_of)

    def earliest_end(self, samples: int, reducible: float) -> float:
        """The least time for these samples if the last pass has gradients by `reducible`."""
        if math.isinf(reducible):
            return self.seconds[samples]
        return next((c.end for c in self._cuts(samples) if c.reducible <= reducible), math.inf)

    def earliest_reducible(self, samples: int, end: float) -> float:
        """The earliest gradients of the last pass if these samples are computed by `end`."""
        return min((c.reducible for c in self._cuts(samples) if c.end <= end), default=math.inf)

    def cut(self, samples: int, latest: float, reducible: float) -> tuple[int, ...]:
        """Passes of `samples` within these bounds, smaller ones first."""
        if reducible >= latest:
            return tuple(sorted(self._cheapest(samples)))
        last = next(cut.last for cut in self._cuts(samples) if cut.reducible <= reducible)
        return (*sorted(self._cheapest(samples - last)), last)

    def _cuts_of(self, samples: int) -> tuple[Cut, ...]:
        """The ways to run `samples` that no other way improves in both times, by `end`."""
        cuts = []
        for last in range(1, min(len(self._pass_seconds) - 1, samples) + 1):
            end = self._pass_seconds[last] + self.seconds[samples - last]
            cuts.append(Cut(end, end - self._reducible_fraction * self._pass_seconds[last], last))
        efficient: list[Cut] = []
        for cut in sorted(cuts):
            if not efficient or cut.reducible < efficient[-1].reducible:
                efficient.append(cut)
        return tuple(efficient)

    def _cheapest(self, samples: int) -> Iterator[int]:
        while samples:
            yield self._last[samples]
            samples -= self._last[samples]


def kth_smallest(
    values: Sequence[Callable[[int], float]],
    lengths: Sequence[int],
    copies: Sequence[int],
    count: int,
) -> float:
    """The `count`-th smallest value of several ascending sequences; infinite if they are fewer.

    Args:
        values: by sequence, a function that returns its `i`-th value, counted from 1.
        lengths: by sequence, how many values it has.
        copies: by sequence, how often it is repeated.
        count: at least 1.
    """

    def total(counts: Sequence[int]) -> int:
        return sum(own * times for own, times in zip(counts, copies, strict=True))

    def counts(bisect: Callable[..., int]) -> list[int]:
        """By sequence, how many values are below the pivot (`bisect_left`), or at most it."""
        windows = zip(values, low, high, strict=True)
        return [bisect(range(1, b + 1), pivot, a, key=value) for value, a, b in windows]

    low, high = [0] * len(lengths), list(lengths)
    while total(high) >= count:
        widest = max(range(len(low)), key=lambda s: high[s] - low[s])
        pivot = values[widest]((low[widest] + high[widest] + 1) // 2)
        if total(below := counts(bisect_left)) >= count:
            high = below
        elif total(at_most := counts(bisect_right)) >= count:
            return pivot
        else:
            low = at_most
    return math.inf
