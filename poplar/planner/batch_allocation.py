"""The best batches when each rank's largest micro-batches (`Caps`) and the communication are given.

`SynchronizedPasses` solves steps in which all ranks synchronize after every pass, and
`IndependentPasses` solves steps with one synchronization. Both are exact on the measured curves;
memory and shares are not considered here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby, product, starmap
from operator import itemgetter
from typing import NamedTuple, TypeVar

from poplar import _core
from poplar.planner.communication_schedule import (
    CommunicationSchedule,
    CommunicationSeconds,
    Exposure,
    Synchronization,
)
from poplar.planner.cost_model import StageCosts, group_equal
from poplar.planner.memory_model import Caps
from poplar.planner.share_limits import ShareLimits, convex_hull, samples_within

K = TypeVar("K", bound=Hashable)
MicroBatches = tuple[tuple[int, ...], ...]
_ROUNDING = 1e-12
"""Relative difference below which two times are equal."""


class BatchAllocator:
    """Solvers for one stage and global batch, for any caps; they share their tables."""

    def __init__(self, costs: StageCosts, global_batch: int) -> None:
        def seconds(rank: int) -> list[float]:
            largest = min(global_batch, costs.cluster.devices[rank].max_batch)
            return costs.pass_seconds_up_to(rank, largest)

        self._costs = costs
        self._global_batch = global_batch
        self._groups = costs.cluster.device_group_indices
        self._pass_seconds = dict(zip(self._groups, costs.by_rank(seconds), strict=True))
        """By device group, of passes of 0, 1, 2, ... samples."""
        self._rank_passes = cache(self._rank_passes_of)
        self._columns = cache(self._columns_under)
        self.under = cache(self._under)
        """The solver under these caps of every rank, which are at least 0 for the first pass."""

    def _under(self, caps: tuple[Caps, ...]) -> SynchronizedPasses | IndependentPasses:
        if self._costs.synchronizes_every_pass:
            first, later = zip(*caps, strict=True)
            others = self._columns(later) if min(later) >= 0 else None
            return SynchronizedPasses(self._costs, self._columns(first), others, self._global_batch)
        tables = [(ranks, self._rank_passes(group, cap)) for ranks, group, cap in self._equal(caps)]
        return IndependentPasses(self._costs, tables, self._global_batch)

    def within(self, first: ShareLimits, later: ShareLimits | None) -> SynchronizedPasses:
        """The solver for passes beside the shares; without limits of later passes, for one pass."""
        others = None if later is None else self._columns_within(later)
        return SynchronizedPasses(
            self._costs, self._columns_within(first), others, self._global_batch
        )

    def _equal(self, keys: Sequence[K]) -> list[tuple[list[int], int, K]]:
        """Ranks with equal devices and keys, their device group and their key."""
        equal = group_equal(zip(self._groups, keys, strict=True))
        return [(ranks, self._groups[ranks[0]], keys[ranks[0]]) for ranks in equal]

    def _columns_under(self, caps: tuple[int, ...]) -> Columns:
        passes = [
            (ranks, self._pass_seconds[group][: cap + 1]) for ranks, group, cap in self._equal(caps)
        ]
        return Columns(self._costs, passes, self._global_batch)

    def _columns_within(self, limits: ShareLimits) -> Columns:
        equal = self._equal(limits.by_rank)
        passes = [(ranks, self._pass_seconds[group][: len(own)]) for ranks, group, own in equal]
        losses = [limits.losses(own) for _, _, own in equal]
        return Columns(self._costs, passes, limits.most, losses, limits.spare)

    def _rank_passes_of(self, group: int, caps: Caps) -> RankPasses:
        passes = self._pass_seconds[group][: caps.first + 1]
        return RankPasses(passes, caps.later, self._global_batch, self._costs.reducible_fraction)


class Columns:
    """Passes of all ranks that end in one synchronization.

    A pass of `m` samples, over all ranks, lasts at least as long as the `m`-th fastest of all
    samples that any rank can add. Of passes that last equally long only the largest matters.
    """

    def __init__(
        self,
        costs: StageCosts,
        groups: Sequence[tuple[Sequence[int], Sequence[float]]],
        most: int,
        losses: Sequence[Sequence[float]] = (),
        spare: float = 0.0,
    ) -> None:
        """Args:
        costs: of the stage.
        groups: of equal ranks: their ranks, and the seconds of a pass of 0, 1, ... samples.
        most: the largest pass that is needed.
        losses: by group, what each sample takes of a rank's largest share; ascending. Empty: the
            ranks' samples are not limited together.
        spare: the largest shares of all ranks without samples, beyond what they must own together.
        """
        self._world_size = costs.cluster.world_size
        self._groups = groups
        self._losses = losses
        self._order: list[int] = []
        """Groups whose ranks take one more sample each, in this order."""
        self._ends: list[int] = []
        """By size, how many entries of `_order` last at most as long."""
        self.synchronizations: list[Synchronization] = []
        """One for each different duration of a pass, shortest first."""
        self.sizes: list[int] = []
        """How many samples each of these passes holds at most."""
        total = 0
        ascending: list[float] = []
        counts: Counter[float] = Counter()
        samples = [
            (seconds, group, number)
            for group, (_, own) in enumerate(groups)
            for number, seconds in enumerate(own[1:])
        ]
        for latest, same in groupby(sorted(samples), key=itemgetter(0)):
            for _, group, number in same:
                ranks = len(groups[group][0])
                total += ranks
                self._order.append(group)
                if losses:
                    loss = losses[group][number]
                    if loss not in counts:
                        insort(ascending, loss)
                    counts[loss] += ranks
            size = min(total, most)
            if losses:
                taken = ((loss, counts[loss]) for loss in ascending)
                size = min(size, samples_within(spare, taken))
            if size > (self.sizes[-1] if self.sizes else 0):
                reducible = latest - costs.reducible_fraction * latest
                self.synchronizations.append(Synchronization(latest, reducible))
                self.sizes.append(size)
                self._ends.append(len(self._order))
            if size >= most:
                break

    def synchronization(self, samples: int) -> Synchronization:
        """The shortest synchronization whose pass holds this many samples."""
        return self.synchronizations[bisect_left(self.sizes, samples)]

    def column(self, size: int) -> list[int]:
        """By rank, its samples in a pass of this size."""
        order = self._order[: self._ends[bisect_left(self.sizes, size)]]
        if self._losses:  # those that take the least of the shares
            numbers = [range(count) for count in Counter(order).values()]
            items = zip(Counter(order), numbers, strict=True)
            order = [
                group
                for _, group in sorted(
                    (self._losses[group][number], group) for group, own in items for number in own
                )
            ]
        column = [0] * self._world_size
        for group in order:
            for rank in self._groups[group][0][: max(0, size)]:
                column[rank] += 1
            size -= len(self._groups[group][0])
            if size <= 0:
                break
        return column


Bound = tuple[CommunicationSeconds, float]
"""Seconds that no step with this communication is faster than."""
SecondsOf = Callable[[CommunicationSchedule, Columns], Sequence[float]]
"""The seconds of each size of some columns, with a schedule of the communication."""


class SynchronizedPasses:
    """Batches of a step whose passes all end in a synchronization.

    Without caps of later passes a step is one pass. Otherwise it is the cheapest way to write the
    global batch as the sum of a first pass and at least one later pass.
    """

    def __init__(
        self, costs: StageCosts, first: Columns, later: Columns | None, global_batch: int
    ) -> None:
        self._costs, self._first, self._later = costs, first, later
        self._global_batch = global_batch
        if later is None:
            self.is_feasible = bool(first.sizes) and first.sizes[-1] >= global_batch
        else:
            self.is_feasible = bool(first.sizes and later.sizes) and global_batch > 1

    def cheapest(self, communication: CommunicationSeconds) -> MicroBatches:
        """The batches of the fastest step with this communication; empty: there are none."""
        return self.micro_batches(self.cheapest_sizes(communication)) if self.is_feasible else ()

    def cheapest_sizes(self, communication: CommunicationSeconds) -> tuple[int, ...]:
        """The sizes of the passes of the fastest step with this communication, in order."""

        @cache
        def seconds(schedule: CommunicationSchedule, columns: Columns) -> list[float]:
            return list(map(schedule.seconds_with(communication), columns.synchronizations))

        return tuple(self._cover(seconds)[1])

    def lower_bounds(
        self,
        least: CommunicationSeconds,
        most: CommunicationSeconds,
        passes: tuple[int, int] | None,
    ) -> Iterator[list[Bound]]:
        """Lower bounds on the step, without its tail, at the corners of a box of communication.

        Each list has the values of a function that is concave within the box: the minimum of linear
        functions, because every synchronization is bounded by its tangent at `least`.

        Args:
            least: of each collective.
            most: of each collective.
            passes: the least and the most passes of a step, two or more. Then a second list has
                bounds by the number of passes. They do not look at single samples, so those of the
                first list may be larger.
        """

        @cache
        def tangents(schedule: CommunicationSchedule, columns: Columns) -> list[Exposure]:
            return list(map(schedule.tangents_at(least), columns.synchronizations))

        def bounded(corner: CommunicationSeconds) -> SecondsOf:
            gather, reduce = corner

            def seconds(schedule: CommunicationSchedule, columns: Columns) -> list[float]:
                bounds = [
                    one.latest + (by_gather * gather + by_reduce * reduce + alone)
                    for one, (by_gather, by_reduce, alone) in zip(
                        columns.synchronizations, tangents(schedule, columns), strict=True
                    )
                ]
                # The tangent of a larger synchronization may be flatter, but its seconds are never
                # fewer.
                return list(accumulate(reversed(bounds), min))[::-1]

            return cache(seconds)

        corners = [(corner, bounded(corner)) for corner in _corners(least, most)]
        yield [(corner, self._cover(seconds)[0]) for corner, seconds in corners]
        if passes is not None:
            yield [(corner, self._least_by_number(seconds, passes)) for corner, seconds in corners]

    def _least_by_number(self, seconds: SecondsOf, passes: tuple[int, int]) -> float:
        """The least seconds of some number of passes if those after the first one are as large as
        they are on average, and their seconds are the convex hull of those of all sizes.
        """
        usual, costliest = self._costs.schedules
        assert self._later is not None, "steps with one pass have no passes after it"
        begin = costliest if self._costs.costliest_comes_first else usual
        sizes, own = self._later.sizes, seconds(usual, self._later)
        corners = convex_hull({1: own[0], **dict(zip(sizes, own, strict=True))}.items())
        best, _ = min(corners, key=lambda corner: corner[1] / corner[0])
        found = math.inf
        for size, first in zip(self._first.sizes, seconds(begin, self._first), strict=True):
            left = self._global_batch - min(size, self._global_batch - 1)
            fewest = max(passes[0] - 1, left / sizes[-1])
            number = min(max(fewest, left / best), passes[1] - 1)
            if number >= fewest:
                found = min(found, first + number * _interpolated(corners, left / number))
        return found

    def _cover(self, seconds: SecondsOf) -> tuple[float, Sequence[int]]:
        """The cheapest passes that hold the global batch, in order, and their seconds.

        Args:
            seconds: of each size of some columns, with a schedule of the communication.
        """
        usual, costliest = self._costs.schedules
        first, later, total = self._first, self._later, self._global_batch
        if later is None:
            return seconds(costliest, first)[bisect_left(first.sizes, total)], (total,)
        ends = (costliest, usual) if self._costs.costliest_comes_first else (usual, costliest)
        return _core.cheapest_cover(
            first.sizes,
            seconds(ends[0], first),
            later.sizes,
            seconds(usual, later),
            seconds(ends[1], later),
            total,
        )

    def synchronizations(self, sizes: Sequence[int]) -> Counter[tuple[Synchronization, bool]]:
        """How many synchronizations of each kind end passes of these sizes; see `counted`."""
        first, *others = sizes
        columns = self._later or self._first
        counts = self._costs.counted(
            [self._first.synchronization(first), *map(columns.synchronization, others[-1:])]
        )
        for size, count in Counter(others[:-1]).items():
            counts[columns.synchronization(size), False] += count
        return counts

    def micro_batches(self, sizes: Sequence[int]) -> MicroBatches:
        """Every rank's part of passes of these sizes."""
        first, *others = sizes
        columns = {size: self._later.column(size) for size in set(others)} if self._later else {}
        return tuple(
            zip(self._first.column(first), *(columns[size] for size in others), strict=True)
        )


def _corners(least: CommunicationSeconds, most: CommunicationSeconds) -> list[CommunicationSeconds]:
    """The corners of a box of communication."""
    ranges = map(set, zip(least, most, strict=True))
    return sorted(starmap(CommunicationSeconds, product(*ranges)))


def _interpolated(corners: Sequence[tuple[int, float]], size: float) -> float:
    """The value between two corners; that of the nearest one outside of them."""
    at = bisect_left(corners, size, key=itemgetter(0))
    if at in (0, len(corners)):
        return corners[max(0, at - 1)][1]
    (before, early), (after, late) = corners[at - 1 : at + 1]
    return early + (late - early) * (size - before) / (after - before)


@dataclass(frozen=True)
class Split:
    """Batches of a step with one synchronization."""

    synchronization: Synchronization
    runs: Sequence[tuple[Sequence[int], RankPasses, Cut]]
    """Ranks that run the same passes, and how; other ranks have no samples."""

    def micro_batches(self, world_size: int) -> MicroBatches:
        """By rank, its passes."""
        batches: list[tuple[int, ...]] = [()] * world_size
        for ranks, passes, cut in self.runs:
            own = passes.passes(cut)
            for rank in ranks:
                batches[rank] = own
        return tuple(batches)


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
        """The batches of the fastest step with this communication; empty: there are none."""
        fastest: Split | None = None
        best = math.inf
        splits = self.splits(communication, limit=lambda: best)
        for split in splits:
            seconds = self._costs.schedule.seconds(split.synchronization, communication)
            if seconds < best:
                best, fastest = seconds, split
        return fastest.micro_batches(self._costs.cluster.world_size) if fastest else ()

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
        most_samples = [passes.most for _, passes in self._groups]
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
            target = min(limit() - alone, min(reducible, target) - _ROUNDING * latest)

    def _kth_smallest(
        self, value: Callable[[RankPasses, int], float], limits: Sequence[int]
    ) -> float:
        """The least value up to which the ranks together can run the global batch."""
        values = [partial(value, passes) for _, passes in self._groups]
        copies = [len(ranks) for ranks, _ in self._groups]
        return kth_smallest(values, limits, copies, self._global_batch)

    def _split(self, latest: float, reducible: float) -> Split:
        """The global batch with this `latest` and the least `reducible`, which is at most this."""
        # The same passes, summed in another order, may end a little later.
        end = latest * (1.0 + _ROUNDING)
        limits = [
            bisect_right(range(1, passes.most + 1), end, key=passes.seconds)
            for _, passes in self._groups
        ]
        if self._costs.overlaps:
            start = partial(RankPasses.earliest_reducible, end=end)
            reducible = self._kth_smallest(start, limits)
            limits = [
                bisect_right(range(1, limit + 1), reducible, key=partial(start, passes))
                for limit, (_, passes) in zip(limits, self._groups, strict=True)
            ]
        runs: list[tuple[Sequence[int], RankPasses, Cut]] = []
        left = self._global_batch
        for (ranks, passes), limit in zip(self._groups, limits, strict=True):
            full, rest = divmod(min(left, limit * len(ranks)), limit) if limit else (0, 0)
            left -= full * limit + rest
            for samples, some in ((limit, ranks[:full]), (rest, ranks[full : full + 1])):
                if samples and some:
                    runs.append((some, passes, passes.cut(samples, latest, reducible)))
        synchronization = Synchronization(
            max(cut.end for *_, cut in runs), max(cut.reducible for *_, cut in runs)
        )
        return Split(synchronization, runs)


class Cut(NamedTuple):
    """One way to run some samples on one rank."""

    end: float
    reducible: float
    last: int
    """Samples of the last pass; those before it are cut in the cheapest way. 0: all are."""
    samples: int


class RankPasses:
    """How one rank runs any number of samples in passes of limited size."""

    def __init__(
        self,
        pass_seconds: Sequence[float],
        later: int,
        global_batch: int,
        reducible_fraction: float,
    ) -> None:
        """Tables for up to `global_batch` samples.

        Args:
            pass_seconds: of passes of 0, 1, ... samples, up to the largest first pass.
            later: the largest pass after the first one; below 1: there is only one pass.
            global_batch: most samples of this rank.
            reducible_fraction: the part of a pass, up to its end, in which gradients are reduced.
        """
        self._pass_seconds, self._later = pass_seconds, min(later, len(pass_seconds) - 1)
        self._reducible_fraction = reducible_fraction
        self._table, self._first, self._last = _core.cheapest_passes(
            pass_seconds, later, global_batch
        )
        self.most = len(self._table) - 1
        """Samples that this rank can run."""
        self._cuts = cache(self._cuts_of)

    def seconds(self, samples: int) -> float:
        """The least time for these samples; does not decrease."""
        return self._table[samples]

    def earliest_end(self, samples: int, reducible: float) -> float:
        """The least time for these samples if the last pass has gradients by `reducible`."""
        if math.isinf(reducible):
            return self.seconds(samples)
        return next((c.end for c in self._cuts(samples) if c.reducible <= reducible), math.inf)

    def earliest_reducible(self, samples: int, end: float) -> float:
        """The earliest gradients of the last pass if these samples are computed by `end`."""
        return min((c.reducible for c in self._cuts(samples) if c.end <= end), default=math.inf)

    def cut(self, samples: int, latest: float, reducible: float) -> Cut:
        """How to run `samples` within these bounds."""
        if reducible >= latest:
            end = self.seconds(samples)
            return Cut(end, end, 0, samples)
        return next(cut for cut in self._cuts(samples) if cut.reducible <= reducible)

    def passes(self, cut: Cut) -> tuple[int, ...]:
        """The passes of a cut, in the order that needs the least memory."""
        before = self._cheapest(cut.samples - cut.last)
        return (*before[-1:], *before[:-1], *((cut.last,) if cut.last else ()))

    def _cuts_of(self, samples: int) -> tuple[Cut, ...]:
        """The ways to run `samples` that no other way improves in both times, by `end`."""
        lasts = list(range(1, min(self._later, samples - 1) + 1))
        if samples < len(self._pass_seconds):
            lasts.append(samples)
        cuts = []
        for last in lasts:
            end = self._pass_seconds[last] + self.seconds(samples - last)
            reducible = end - self._reducible_fraction * self._pass_seconds[last]
            cuts.append(Cut(end, reducible, last, samples))
        efficient: list[Cut] = []
        for cut in sorted(cuts):
            if not efficient or cut.reducible < efficient[-1].reducible:
                efficient.append(cut)
        return tuple(efficient)

    def _cheapest(self, samples: int) -> list[int]:
        """The passes of the fastest way to run samples, ascending."""
        found: list[int] = []
        if first := self._first[samples]:
            found.append(first)
            samples -= first
        while samples:
            found.append(self._last[samples])
            samples -= found[-1]
        return sorted(found)


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
        middle = (low[widest] + high[widest] + 1) // 2
        pivot = values[widest](middle)
        # Rounding may make values descend a little: every round must still leave fewer of them.
        below, at_most = counts(bisect_left), counts(bisect_right)
        below[widest] = min(below[widest], middle - 1)
        at_most[widest] = max(at_most[widest], middle)
        if total(below) >= count:
            high = below
        elif total(at_most) >= count:
            return pivot
        else:
            low = at_most
    return math.inf
