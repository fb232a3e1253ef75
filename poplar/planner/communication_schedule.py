"""What one synchronization communicates, and how much of it overlaps compute.

The closed form needs sums over a pass instead of its order. They are derived from the actions of a
rank (`step.actions`). Collectives are measured in elements, and compute in ticks (`StepUnits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import Literal, NamedTuple

from poplar.step.actions import RANK_ACTIONS, Compute, Wait
from poplar.step.units import StepUnits
from poplar.values.profile import ModelProfile

_MAX_WINDOWS = 3
"""Of a forward; each adds a row to every linear program."""
_MAX_CUTS = 3
"""Of a backward."""
_RATIOS = (1e-6, 0.25, 0.5, 1.0, 2.0, 4.0, 1e6)
"""Communication over compute of a pass at which its longest chain gives a bound."""
_ROUNDING = 1e-12


class Synchronization(NamedTuple):
    """When the compute before a synchronization ends, in seconds since the previous one."""

    latest: float
    """`T`: the last rank's compute ends."""
    reducible: float
    """`F`: every rank's last backward has begun to produce gradients."""


class CommunicationSeconds(NamedTuple):
    """Seconds of one all-gather and one reduction of the whole model under some shares."""

    gather: float
    """0 at stages whose synchronizations all-gather nothing."""
    reduce: float


class OverlapLine(NamedTuple):
    """An upper bound on overlapped seconds, linear in the communication and in the compute."""

    gather: float = 0.0
    reduce: float = 0.0
    latest: float = 0.0
    reducible: float = 0.0


class Exposure(NamedTuple):
    """A lower bound on exposed communication, linear in the seconds of the collectives."""

    gather: float
    reduce: float
    seconds: float

    def at(self, communication: CommunicationSeconds) -> float:
        """The bound's value."""
        gather, reduce = communication
        return self.gather * gather + self.reduce * reduce + self.seconds


@dataclass(frozen=True, slots=True)
class CommunicationSchedule:
    """One synchronization. It reduces the whole model once."""

    gathers: float
    """All-gathers, in whole models: parameters at stage 3, reduced gradients at stage 0. A frozen
    parameter counts by its bytes, so of adapters there are many."""
    reduction_start: float
    """Fraction of the backward before the first reduction."""
    overlap_bounds: tuple[tuple[OverlapLine, ...], ...]
    """The overlapped seconds are the least line of each group, summed over the groups."""
    residual: float = 0.0
    """Measured seconds of a synchronization beyond its collectives."""

    def seconds(
        self, synchronization: Synchronization, communication: CommunicationSeconds
    ) -> float:
        """Seconds from the previous synchronization to the end of this one."""
        return self.seconds_with(communication)(synchronization)

    def seconds_with(
        self, communication: CommunicationSeconds
    ) -> Callable[[Synchronization], float]:
        """`seconds` with this communication, for many synchronizations."""
        groups = self._values_at(communication)
        gather, reduce = communication
        alone = self.gathers * gather + reduce + self.residual

        def seconds(synchronization: Synchronization) -> float:
            latest, reducible = synchronization
            exposed = alone
            for lines in groups:
                exposed -= min(
                    [
                        communicated + by_latest * latest + by_reducible * reducible
                        for communicated, by_latest, by_reducible in lines
                    ]
                )
            return latest + max(0.0, exposed)

        return seconds

    def _values_at(
        self, communication: CommunicationSeconds
    ) -> list[list[tuple[float, float, float]]]:
        """The lines of each group as functions of the compute only."""
        gather, reduce = communication
        return [
            [(line.gather * gather + line.reduce * reduce, *line[2:]) for line in lines]
            for lines in self.overlap_bounds
        ]

    def exposures(self, synchronization: Synchronization) -> list[Exposure]:
        """The exposed communication is the largest of these bounds, at least 0."""
        return [self._exposure(lines, synchronization) for lines in product(*self.overlap_bounds)]

    def tangents_at(
        self, communication: CommunicationSeconds
    ) -> Callable[[Synchronization], Exposure]:
        """By synchronization, the largest bound at this communication, where it is exact."""
        groups = self._values_at(communication)

        def tangent(synchronization: Synchronization) -> Exposure:
            latest, reducible = synchronization
            chosen = []
            for lines, values in zip(self.overlap_bounds, groups, strict=True):
                overlaps = [
                    communicated + by_latest * latest + by_reducible * reducible
                    for communicated, by_latest, by_reducible in values
                ]
                chosen.append(lines[overlaps.index(min(overlaps))])
            exposure = self._exposure(chosen, synchronization)
            return exposure if exposure.at(communication) > 0.0 else Exposure(0.0, 0.0, 0.0)

        return tangent

    def _exposure(self, lines: Iterable[OverlapLine], synchronization: Synchronization) -> Exposure:
        latest, reducible = synchronization
        gather, reduce, seconds = self.gathers, 1.0, self.residual
        for line in lines:
            gather -= line.gather
            reduce -= line.reduce
            seconds -= line.latest * latest + line.reducible * reducible
        return Exposure(gather, reduce, seconds)


@lru_cache(maxsize=256)  # a search asks for the same stages and persistent units many times
def schedules(
    model: ModelProfile,
    stage: int,
    persistent: frozenset[int],
    overlap: float,
    backward_fraction: float,
    may_merge: bool = True,
    gather_part: float = 0.5,
) -> tuple[CommunicationSchedule, CommunicationSchedule]:
    """The schedules of a usual synchronization of a step and of the costliest one.

    At stage 2 the costliest one is the last: no forward follows it. At stage 3 it is the first,
    which also unshards the persistent units.

    Args:
        overlap: seconds of compute per second during communication.
        may_merge: small units share buffers before stage 3.
        gather_part: seconds of an all-gather of the model over those and the seconds of its
            reduction, about. Only used if the compute of the units was measured.
    """
    layout = StepUnits.of(model, stage, persistent, may_merge=may_merge)
    settings = overlap, backward_fraction, gather_part
    first = _Pass(layout, stage, 0, *settings)
    if stage == 3:
        later = _Pass(layout, stage, 1, *settings)
        return (
            later.schedule(later.unsharding_bounds(first)),
            first.schedule(first.unsharding_bounds(first)),
        )
    costliest = first.schedule([first.backward_lines()])
    return (first.schedule([first.continued_lines()]) if stage == 2 else costliest), costliest


@dataclass
class _Collective:
    """A collective of a pass. Positions count the ticks of compute before it."""

    is_gather: bool
    unit: int
    pass_index: int | None
    numel: float
    issued: int
    """Position at which it is issued."""
    needed: int = -1
    """Position at which the rank waits for it."""


class _Pass:
    """A pass of a rank with samples."""

    def __init__(
        self,
        layout: StepUnits,
        stage: int,
        pass_index: int,
        overlap: float,
        backward_fraction: float,
        gather_part: float,
    ) -> None:
        self._layout, self._stage = layout, stage
        self._gather_part = gather_part
        self._events: list[Event] = []
        """In order; those of earlier passes take no time."""
        self._numel, self._ticks = layout.numel, layout.ticks
        self._overlap, self._backward_fraction = overlap, backward_fraction
        position = -2 * self._ticks * pass_index
        issued: list[_Collective] = []
        for action in RANK_ACTIONS[stage](layout, (True,) * (pass_index + 1)).passes():
            if isinstance(action, Wait):
                issued[action.position].needed = position
                self._events.append(Event("wait", action.position))
            elif action.unit is not None:
                is_own = action.pass_index in (pass_index, None)
                if isinstance(action, Compute):
                    ticks = layout.forward if action.what == "forward" else layout.backward
                    before, position = position, position + ticks[action.unit]
                    if is_own:
                        self._events.append(Event("compute", self._seconds(before, position)))
                    continue
                is_gather = action.what != "reduce"
                if action.what == "unshard":
                    part = layout.unsharded[action.unit]
                else:
                    calls = 1 if is_gather else len(layout.buffers[action.unit])
                    part = layout.numels[action.unit] / calls
                issued.append(
                    _Collective(is_gather, action.unit, action.pass_index, part, position)
                )
                what: Literal["gather", "reduce"] = "gather" if is_gather else "reduce"
                self._events.append(Event(what, part if is_own else 0.0))
        self._collectives = [one for one in issued if one.pass_index in (pass_index, None)]
        self._gathers = [one for one in self._collectives if one.is_gather]
        self._reductions = [one for one in self._collectives if not one.is_gather]
        self._first = self._reductions[0].issued
        """Position of the first reduction. Before it, an unshard overlaps only the compute before
        its use; after it, all of the backward is one window."""

    def schedule(self, groups: Iterable[Sequence[OverlapLine]]) -> CommunicationSchedule:
        """The schedule of this pass with these overlap bounds."""
        return CommunicationSchedule(
            gathers=_sum(self._gathers) / self._numel,
            reduction_start=self._first / self._ticks - 1.0,
            overlap_bounds=tuple(map(tuple, groups)) if self._overlap else (),
        )

    def _line(
        self, collectives: Iterable[_Collective], latest: float = 0.0, reducible: float = 0.0
    ) -> OverlapLine:
        """The overlap of these collectives, and of some compute."""
        numels = {True: 0.0, False: 0.0}
        for one in collectives:
            numels[one.is_gather] += one.numel
        scale = self._overlap / self._numel
        return OverlapLine(scale * numels[True], scale * numels[False], latest, reducible)

    def _seconds(self, begin: int, end: int) -> float:
        """Compute between two positions, as a fraction of a pass."""
        forward = min(end, self._ticks) - min(begin, self._ticks)
        backward = end - begin - forward
        weighted = (1.0 - self._backward_fraction) * forward + self._backward_fraction * backward
        return weighted / self._ticks

    def backward_lines(self) -> list[OverlapLine]:
        """Communication during the backward overlaps at most the rest of the backward."""
        issued = (one for one in self._collectives if self._first <= one.issued < 2 * self._ticks)
        lines = [self._line(issued), OverlapLine(latest=1.0, reducible=-1.0)]
        return lines if self._layout.is_proportional else [*lines, *self._chain_lines()]

    def _chain_lines(self) -> list[OverlapLine]:
        """What the longest chain of this pass leaves to overlap, at some ratios of communication to
        compute. Each is an upper bound at every ratio, and exact where its chain is the longest.

        [Note: measured units]
        More persistent units never make a pass longer, but the bounds are exact only at these
        ratios. So the closed form may find it longer, by up to 1 % on random models.
        """
        if not self._overlap:
            return []
        gathered, reduced = _sum(self._gathers), _sum(self._reductions)
        window = self._seconds(self._first, 2 * self._ticks)
        lines: dict[OverlapLine, None] = {}
        for ratio in _RATIOS:
            each = ratio / self._numel
            chain = longest_chain(
                self._events, each * self._gather_part, each * (1.0 - self._gather_part)
            )
            scale, rest = self._overlap / self._numel, max(0.0, 1.0 - chain.compute)
            line = OverlapLine(
                scale * max(0.0, gathered - chain.gather), scale * max(0.0, reduced - chain.reduce)
            )
            if self._stage == 3:
                line = line._replace(latest=rest)
            elif window:
                rest = min(1.0, rest / window)
                line = line._replace(latest=rest, reducible=-rest)
            lines[line] = None
        return list(lines)

    def continued_lines(self) -> list[OverlapLine]:
        """Reductions in flight at the end of this pass can run under the next one's forward."""
        last = self._reductions[-self._layout.reductions_in_flight :]
        issued, _, *chains = self.backward_lines()
        in_flight = self._line(last)
        return [
            self._line(self._reductions),
            issued._replace(reducible=1.0),
            in_flight._replace(latest=1.0, reducible=-1.0),
            OverlapLine(latest=1.0),
            *(line._replace(reducible=line.reducible + 1.0) for line in chains),
            *(line._replace(reduce=line.reduce + in_flight.reduce) for line in chains),
        ]

    def unsharding_bounds(self, first: _Pass) -> list[list[OverlapLine]]:
        """The groups of a pass that waits for its unshards; `first` unshards every unit."""
        if self._layout.is_proportional:
            groups = [self._window_lines(first), [*self.backward_lines(), *self._cut_lines()]]
        else:
            groups = [self._chain_lines()]
        free = min([self._ticks, *(one.needed for one in self._gathers)])
        if free:  # the next pass's forward begins without an unshard
            left = (one for one in self._reductions if one.issued >= 2 * self._ticks)
            groups.append([self._line(left), OverlapLine(latest=self._seconds(0, free))])
        return groups

    def _window_lines(self, first: _Pass) -> list[OverlapLine]:
        """Unshards that are issued in the forward overlap only the compute before their use.

        As communication grows, these windows fill one after the other, the narrowest first.
        """
        windows = list(self._forward_windows(first))
        for one in self._gathers:
            if one.issued < self._first and one.needed > self._ticks:
                windows.append(([one], self._seconds(one.issued, one.needed)))
        windows.sort(key=lambda window: window[1] / _sum(window[0]))
        return [
            self._line(
                (one for gathers, _ in windows[filled:] for one in gathers),
                latest=sum(seconds for _, seconds in windows[:filled]),
            )
            for filled in range(len(windows) + 1)
        ]

    def _forward_windows(self, first: _Pass) -> Iterator[tuple[list[_Collective], float]]:
        """Each unit's forward overlaps the unshard of the next unit; equal ratios share a window.

        If there are many ratios, the most similar ones are merged independently of what is
        unsharded, so that unsharding more never costs less.
        """

        def ratio(one: _Collective) -> float:
            return one.numel / (one.needed - one.issued)

        candidates = (one for one in first._gathers if one.issued < one.needed <= self._ticks)
        groups = [list(group) for _, group in groupby(sorted(candidates, key=ratio), key=ratio)]
        is_merged = len(groups) > _MAX_WINDOWS
        while len(groups) > _MAX_WINDOWS:
            steps = [ratio(after[0]) / ratio(before[0]) for before, after in pairwise(groups)]
            at = steps.index(min(steps))
            groups[at : at + 2] = [groups[at] + groups[at + 1]]
        gathered = {one.unit for one in self._gathers}
        for group in groups:
            arriving = [one for one in group if one.unit in gathered]
            if arriving:
                overlapping = group if is_merged else arriving
                yield arriving, sum(self._seconds(one.issued, one.needed) for one in overlapping)

    def _cut_lines(self) -> list[OverlapLine]:
        """The backward waits for its unshards: at each, communication issued later remains.

        Lines that follow from their neighbours are left out. If many remain, only that of the last
        unshard is used.
        """
        end = 2 * self._ticks
        lines = []
        for number, one in enumerate(self._collectives):
            if one.is_gather and one.needed >= self._first:
                later = (after for after in self._collectives[number + 1 :] if after.issued < end)
                done = 1.0 - self._seconds(one.needed, end)
                lines.append(self._line(later, latest=done, reducible=-1.0))
        distinct = [
            line
            for number, line in enumerate(lines)
            if not 0 < number < len(lines) - 1 or not _is_between(*lines[number - 1 : number + 2])
        ]
        return distinct if len(distinct) <= _MAX_CUTS else distinct[-1:]


def _sum(collectives: Iterable[_Collective]) -> float:
    return sum(one.numel for one in collectives)


def _is_between(before: OverlapLine, line: OverlapLine, after: OverlapLine) -> bool:
    """Whether a bound is a mean of its neighbours, which then imply it."""
    fraction = (line.latest - before.latest) / ((after.latest - before.latest) or 1.0)
    return all(
        abs(first + fraction * (last - first) - value) < _ROUNDING
        for first, value, last in zip(before, line, after, strict=True)
    )


class Event(NamedTuple):
    """What one rank does next."""

    what: Literal["compute", "gather", "reduce", "wait"]
    """Collectives run one after the other, beside compute."""
    amount: float
    """Of compute a fraction of a pass, of a collective its elements, and of a wait the number of
    the collective."""


class Chain(NamedTuple):
    """The sums over a chain."""

    seconds: float = 0.0
    """Where a pass computes for 1 second."""
    compute: float = 0.0
    """As a fraction of a pass."""
    gather: float = 0.0
    """Elements."""
    reduce: float = 0.0
    """Elements."""


def longest_chain(events: Iterable[Event], gather_each: float, reduce_each: float) -> Chain:
    """The longest chain of events of a pass, each of which waits for the one before.

    A pass takes as long as the longest of its chains. Which one that is depends on the ratio of
    communication to compute.

    Args:
        events: in the order in which a rank issues them.
        gather_each: seconds of an element in an all-gather.
        reduce_each: seconds of an element in a reduction.
    """
    compute = Chain()
    collectives = [Chain()]  # one that is complete before the pass
    for what, amount in events:
        if what == "wait":
            compute = max(compute, collectives[1 + int(amount)])
        elif what == "compute":
            seconds, computed, gathered, reduced = compute
            compute = Chain(seconds + amount, computed + amount, gathered, reduced)
        else:
            seconds, computed, gathered, reduced = max(compute, collectives[-1])
            if what == "gather":
                seconds, gathered = seconds + gather_each * amount, gathered + amount
            else:
                seconds, reduced = seconds + reduce_each * amount, reduced + amount
            collectives.append(Chain(seconds, computed, gathered, reduced))
    return max(compute, collectives[-1])
