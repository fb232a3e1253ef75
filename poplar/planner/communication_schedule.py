"""What one synchronization communicates, and how much of it overlaps compute.

The closed form needs sums over a pass instead of its order. They are derived from the actions of a
rank (`step_actions`). Elements of the model measure compute and collectives in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from poplar.planner.step_actions import RANK_ACTIONS, Issue, UnitLayout, Wait
from poplar.profile import ModelProfile

_MAX_WINDOWS = 3
"""Of a forward; each adds a row to every linear program."""
_MAX_CUTS = 3
"""Of a backward."""
_ROUNDING = 1e-12


class OverlapLine(NamedTuple):
    """An upper bound on overlapped seconds, linear in the communication and in the compute."""

    gather: float = 0.0
    reduce: float = 0.0
    latest: float = 0.0
    reducible: float = 0.0


@dataclass(frozen=True, slots=True)
class CommunicationSchedule:
    """One synchronization. It reduces the whole model once."""

    gathers: float
    """All-gathers, in whole models: parameters at stage 3, reduced gradients at stage 0."""
    reduction_start: float
    """Fraction of the backward before the first reduction."""
    overlap_bounds: tuple[tuple[OverlapLine, ...], ...]
    """The overlapped seconds are the least line of each group, summed over the groups."""


@lru_cache(maxsize=256)  # a search asks for the same stages and persistent units many times
def schedules(
    model: ModelProfile,
    stage: int,
    persistent: frozenset[int],
    overlap: float,
    backward_fraction: float,
) -> tuple[CommunicationSchedule, CommunicationSchedule]:
    """The schedules of a usual synchronization of a step and of the costliest one.

    At stage 2 the costliest one is the last: no forward follows it. At stage 3 it is the first,
    which also unshards the persistent units.
    """
    layout = UnitLayout.of(model, stage, persistent)
    first = _Pass(layout, stage, 0, overlap, backward_fraction)
    if stage == 3:
        later = _Pass(layout, stage, 1, overlap, backward_fraction)
        return (
            later.schedule(later.unsharding_bounds(first)),
            first.schedule(first.unsharding_bounds(first)),
        )
    costliest = first.schedule([first.backward_lines()])
    return (first.schedule([first.continued_lines()]) if stage == 2 else costliest), costliest


class _Collective(NamedTuple):
    """A collective of a pass. Positions count the elements computed before it, the whole model once
    in the forward and once in the backward.
    """

    is_gather: bool
    unit: int
    numel: float
    issued: int
    """Position at which it is issued."""
    needed: int
    """Position at which the rank waits for it; -1: not in this pass."""


class _Pass:
    """A pass of a rank with samples."""

    def __init__(
        self,
        layout: UnitLayout,
        stage: int,
        pass_index: int,
        overlap: float,
        backward_fraction: float,
    ) -> None:
        self._layout = layout
        self._numel = layout.numel
        self._overlap, self._backward_fraction = overlap, backward_fraction
        rank = RANK_ACTIONS[stage](layout, (True, True))
        position = 0
        issued: list[tuple[str, int, int]] = []
        needed: dict[int, int] = {}
        for action in chain(rank.one_pass(pass_index), rank.finish_reductions()):
            if isinstance(action, Wait):
                needed[action.position] = position
            elif action.unit is not None:
                if isinstance(action, Issue):
                    issued.append((action.what, action.unit, position))
                else:
                    position += layout.numels[action.unit]
        self._collectives = [
            _Collective(
                is_gather=what != "reduce",
                unit=unit,
                numel=layout.numels[unit] / (layout.buffers(unit) if what == "reduce" else 1),
                issued=start,
                needed=needed.get(number, -1),
            )
            for number, (what, unit, start) in enumerate(issued)
        ]
        self._gathers = [one for one in self._collectives if one.is_gather]
        self._reductions = [one for one in self._collectives if not one.is_gather]

    def schedule(self, groups: Iterable[Sequence[OverlapLine]]) -> CommunicationSchedule:
        """The schedule of this pass with these overlap bounds."""
        return CommunicationSchedule(
            gathers=_sum(self._gathers) / self._numel,
            reduction_start=self._reductions[0].issued / self._numel - 1.0,
            overlap_bounds=tuple(map(tuple, groups)) if self._overlap else (),
        )

    def _line(
        self, gathers: Iterable[_Collective] = (), reductions: Iterable[_Collective] = ()
    ) -> OverlapLine:
        """Communication that can overlap."""
        scale = self._overlap / self._numel
        return OverlapLine(gather=scale * _sum(gathers), reduce=scale * _sum(reductions))

    def _seconds(self, begin: int, end: int) -> float:
        """Compute between two positions, as a fraction of a pass."""
        forward = min(end, self._numel) - min(begin, self._numel)
        backward = end - begin - forward
        weighted = (1.0 - self._backward_fraction) * forward + self._backward_fraction * backward
        return weighted / self._numel

    def backward_lines(self) -> list[OverlapLine]:
        """Communication during the backward overlaps at most the rest of the backward."""
        gathers, reductions = (
            [one for one in collectives if self._numel <= one.issued < 2 * self._numel]
            for collectives in (self._gathers, self._reductions)
        )
        return [self._line(gathers, reductions), OverlapLine(latest=1.0, reducible=-1.0)]

    def continued_lines(self) -> list[OverlapLine]:
        """Reductions in flight at the end of this pass can run under the next one's forward."""
        layout = self._layout
        last = self._reductions[::-1][: layout.reductions_in_flight]
        return [
            self._line(reductions=self._reductions),
            self.backward_lines()[0]._replace(reducible=1.0),
            self._line(reductions=last)._replace(latest=1.0, reducible=-1.0),
            OverlapLine(latest=1.0),
        ]

    def unsharding_bounds(self, first: _Pass) -> list[list[OverlapLine]]:
        """The groups of a pass that waits for its unshards; `first` unshards every unit."""
        groups = [self._window_lines(first), [*self.backward_lines(), *self._cut_lines()]]
        free = min([self._numel, *(one.needed for one in self._gathers)])
        if free:  # the next pass's forward begins without an unshard
            left = [one for one in self._reductions if one.issued >= 2 * self._numel]
            groups.append([self._line(reductions=left), OverlapLine(latest=self._seconds(0, free))])
        return groups

    def _window_lines(self, first: _Pass) -> list[OverlapLine]:
        """Unshards that are issued in the forward overlap only the compute before their use.

        As communication grows, these windows fill one after the other, the narrowest first.
        """
        windows = list(self._forward_windows(first))
        for one in self._gathers:
            if one.issued < self._numel < one.needed:
                windows.append(([one], self._seconds(one.issued, one.needed)))
        windows.sort(key=lambda window: window[1] / _sum(window[0]))
        return [
            self._line(one for gathers, _ in windows[filled:] for one in gathers)._replace(
                latest=sum(seconds for _, seconds in windows[:filled])
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

        candidates = (one for one in first._gathers if one.issued < one.needed <= self._numel)
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
        lines = []
        for number, one in enumerate(self._collectives):
            if one.is_gather and one.needed > self._numel:
                later = [
                    other
                    for other in self._collectives[number + 1 :]
                    if other.issued < 2 * self._numel
                ]
                line = self._line(
                    (other for other in later if other.is_gather),
                    (other for other in later if not other.is_gather),
                )
                done = 1.0 - self._seconds(one.needed, 2 * self._numel)
                lines.append(line._replace(latest=done, reducible=-1.0))
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
