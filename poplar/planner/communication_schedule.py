"""What one synchronization communicates, and under which compute: derived from the rank's actions.

The closed form needs sums over a pass, not its order: how much is gathered and reduced, and the
windows of compute under which that can run. Parts are fractions of the model's elements, which
measure compute and collectives alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


class Window(NamedTuple):
    """Compute that overlaps only its own part of the gathers."""

    gathers: float
    """Fraction of a whole gather."""
    forward: float
    """Fraction of a whole forward."""
    backward: float = 0.0
    """Fraction of a whole backward."""


class Cut(NamedTuple):
    """A point of the backward that waits for a gather: what is left after it, as fractions."""

    gathers: float
    reductions: float
    backward: float


class OverlapLine(NamedTuple):
    """An upper bound on overlapped seconds: linear in the communication and in the compute."""

    gather: float = 0.0
    reduce: float = 0.0
    latest: float = 0.0
    reducible: float = 0.0


@dataclass(frozen=True, slots=True)
class CommunicationSchedule:
    """One synchronization, in whole gathers of the model; it reduces the whole model once."""

    gathers: float
    turn: float
    """Fraction of the backward before the first reduction."""
    gathers_under_backward: float
    """Gathers issued during the backward."""
    reductions_under_backward: float
    """Fraction of the reductions issued before the backward ends."""
    windows: tuple[Window, ...] = ()
    """Gathers issued during the forward, and the compute between their issue and their use."""
    cuts: tuple[Cut, ...] = ()
    forward_after: float = 0.0
    """Fraction of the next pass's forward that needs no gather."""
    reductions_in_flight: float = 0.0
    """Fraction of the reductions that can still run under the next pass's forward, where a rank may
    start it before they are complete; else 0."""

    def overlap_bounds(
        self, overlap: float, backward_fraction: float
    ) -> tuple[tuple[OverlapLine, ...], ...]:
        """What runs under compute: the least line of each group, summed over the groups."""
        if not overlap:
            return ()
        forward_fraction = 1.0 - backward_fraction
        behind = overlap * self.reductions_under_backward
        groups = [self._window_lines(overlap, backward_fraction)] if self.windows else []
        if self.reductions_in_flight:
            groups.append(
                (
                    OverlapLine(reduce=overlap),
                    OverlapLine(reduce=behind, reducible=1.0),
                    OverlapLine(
                        reduce=overlap * self.reductions_in_flight, latest=1.0, reducible=-1.0
                    ),
                    OverlapLine(latest=1.0),
                )
            )
            return tuple(groups)
        cuts = (
            OverlapLine(
                overlap * cut.gathers,
                overlap * cut.reductions,
                1.0 - backward_fraction * cut.backward,
                -1.0,
            )
            for cut in (Cut(0.0, 0.0, 0.0), *self.cuts)
        )
        groups.append((OverlapLine(overlap * self.gathers_under_backward, behind), *cuts))
        if self.forward_after:
            left = overlap * (1.0 - self.reductions_under_backward)
            following = OverlapLine(latest=forward_fraction * self.forward_after)
            groups.append((OverlapLine(reduce=left), following))
        return tuple(groups)

    def _window_lines(self, overlap: float, backward_fraction: float) -> tuple[OverlapLine, ...]:
        """With more communication windows fill one after the other, the narrowest first."""
        seconds = sorted(
            (
                (
                    window.gathers,
                    window.forward * (1.0 - backward_fraction)
                    + window.backward * backward_fraction,
                )
                for window in self.windows
            ),
            key=lambda window: window[1] / window[0],
        )
        return tuple(
            OverlapLine(
                gather=overlap * sum(gathers for gathers, _ in seconds[filled:]),
                latest=sum(length for _, length in seconds[:filled]),
            )
            for filled in range(len(seconds) + 1)
        )


@lru_cache(maxsize=256)  # a search asks for the same stages and persistent units many times
def schedules(
    model: ModelProfile, stage: int, persistent: frozenset[int] = frozenset()
) -> tuple[CommunicationSchedule, CommunicationSchedule]:
    """The schedules of a usual synchronization of a step and of the most expensive one.

    At stage 2 the most expensive one is the last: no forward follows it. At stage 3 it is the
    first, which also gathers the persistent units.
    """
    layout = UnitLayout.of(model, stage, persistent)
    first = _collectives(layout, stage, pass_index=0)
    if stage == 3:
        later = _collectives(layout, stage, pass_index=1)
        return _unsharding_schedule(layout, first, later), _unsharding_schedule(
            layout, first, first
        )
    only = _schedule(layout, first)
    if stage < 2:
        return only, only
    buffers = [
        layout.numels[unit] / layout.buffers(unit)
        for unit in range(len(layout.numels))
        for _ in range(layout.buffers(unit))
    ]
    in_flight = sum(buffers[: layout.reductions_in_flight]) / layout.numel
    return replace(only, reductions_in_flight=in_flight), only


class _Collective(NamedTuple):
    """A collective of a pass. Positions count the elements computed before, `numel` of the model
    per forward and per backward.
    """

    is_gather: bool
    unit: int
    numel: float
    issued: int
    """Position at which it is issued."""
    needed: int
    """Position at which the rank waits for it; -1: not in this pass."""


def _collectives(layout: UnitLayout, stage: int, pass_index: int) -> list[_Collective]:
    """The collectives of one pass of a rank with samples, in order."""
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
    return [
        _Collective(
            is_gather=what == "gather",
            unit=unit,
            numel=layout.numels[unit] / (1 if what == "gather" else layout.buffers(unit)),
            issued=start,
            needed=needed.get(number, -1),
        )
        for number, (what, unit, start) in enumerate(issued)
    ]


def _schedule(layout: UnitLayout, collectives: Sequence[_Collective]) -> CommunicationSchedule:
    numel = layout.numel
    under_backward = [one for one in collectives if numel <= one.issued < 2 * numel]
    first_reduction = min(one.issued for one in collectives if not one.is_gather)
    return CommunicationSchedule(
        gathers=_sum(one for one in collectives if one.is_gather) / numel,
        turn=first_reduction / numel - 1.0,
        gathers_under_backward=_sum(one for one in under_backward if one.is_gather) / numel,
        reductions_under_backward=_sum(one for one in under_backward if not one.is_gather) / numel,
    )


def _sum(collectives: Iterable[_Collective]) -> float:
    return sum(one.numel for one in collectives)


def _unsharding_schedule(
    layout: UnitLayout, first: Sequence[_Collective], collectives: Sequence[_Collective]
) -> CommunicationSchedule:
    """The schedule of a pass that waits for its gathers.

    Args:
        layout: the units.
        first: collectives of the first pass of a step, which gathers every unit.
        collectives: of the pass that is described.
    """
    numel = layout.numel
    gathers = [one for one in collectives if one.is_gather]
    windows = list(_forward_windows(numel, first, gathers))
    for one in gathers:
        if one.issued < numel < one.needed:
            forward, backward = numel - one.issued, one.needed - numel
            windows.append(Window(one.numel / numel, forward / numel, backward / numel))
    return replace(
        _schedule(layout, collectives),
        windows=tuple(windows),
        cuts=tuple(_cuts(numel, collectives)),
        forward_after=min([numel, *(one.needed for one in gathers)]) / numel,
    )


def _forward_windows(
    numel: int, first: Sequence[_Collective], gathers: Sequence[_Collective]
) -> Iterator[Window]:
    """Each unit's forward overlaps the gather of the next unit; equal ratios share a window.

    If there are many ratios, the most similar ones are merged, whatever is gathered, so that
    gathering more never costs less.
    """

    def ratio(one: _Collective) -> float:
        return one.numel / (one.needed - one.issued)

    candidates = (one for one in first if one.is_gather and one.issued < one.needed <= numel)
    groups = [list(group) for _, group in groupby(sorted(candidates, key=ratio), key=ratio)]
    is_merged = len(groups) > _MAX_WINDOWS
    while len(groups) > _MAX_WINDOWS:
        steps = [ratio(after[0]) / ratio(before[0]) for before, after in pairwise(groups)]
        at = steps.index(min(steps))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    gathered = {one.unit for one in gathers}
    for group in groups:
        arriving = [one for one in group if one.unit in gathered]
        if arriving:
            lengths = (one.needed - one.issued for one in (group if is_merged else arriving))
            yield Window(_sum(arriving) / numel, sum(lengths) / numel)


def _cuts(numel: int, collectives: Sequence[_Collective]) -> list[Cut]:
    """One for each gather of the backward, the last first, without those on a line between others.

    If many remain, only that of the last gather.
    """
    cuts = []
    for number, one in enumerate(collectives):
        if one.is_gather and one.needed > numel:
            later = [other for other in collectives[number + 1 :] if other.issued < 2 * numel]
            gathers = _sum(other for other in later if other.is_gather)
            cuts.append(
                Cut(
                    gathers=gathers / numel,
                    reductions=(_sum(later) - gathers) / numel,
                    backward=2.0 - one.needed / numel,
                )
            )
    cuts.reverse()
    distinct = [
        cut
        for number, cut in enumerate(cuts)
        if not 0 < number < len(cuts) - 1 or not _is_between(*cuts[number - 1 : number + 2])
    ]
    return distinct if len(distinct) <= _MAX_CUTS else distinct[:1]


def _is_between(before: Cut, cut: Cut, after: Cut) -> bool:
    """Whether a cut lies on the straight line between its neighbours, which then imply it."""
    fraction = (cut.backward - before.backward) / (after.backward - before.backward)
    return all(
        abs(first + fraction * (last - first) - value) < _ROUNDING
        for first, value, last in zip(before, cut, after, strict=True)
    )
