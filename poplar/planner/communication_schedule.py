"""What travels at a meeting, and which part of it can run under which compute: by stage.

Units are reduced in the reverse of their order, each once its backward is over, so the last of them
has no backward left to run under, and none can travel before the first. Parts are fractions of the
model's elements: of its compute, and of a whole gather or reduction, alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

from poplar.planner.memory_model import BUCKET_ELEMENTS, buffers_in_flight
from poplar.profile import ModelProfile

_MOST_WINDOWS = 3
"""Of a forward; each is a row more of every linear programme."""
_MOST_CUTS = 3
"""Of a backward."""
_ROUNDING = 1e-12


class Window(NamedTuple):
    """Compute under which nothing but its own part of the gathers travels."""

    gathers: float
    """In whole gathers."""
    forward: float
    """In whole forwards."""
    backward: float
    """In whole backwards."""


class Cut(NamedTuple):
    """What is left when a unit's backward is over under which a gather travels."""

    gathers: float
    """In whole gathers."""
    reductions: float
    """In whole reductions."""
    backward: float
    """In whole backwards."""


@dataclass(frozen=True, slots=True)
class CommunicationSchedule:
    """Of one meeting, in whole gathers and whole reductions of the model; one reduction travels."""

    gathers: float = 0.0
    """That travel."""
    windows: tuple[Window, ...] = ()
    """What of the gathers can run under compute up to the last unit's backward."""
    gathers_under_backward: float = 0.0
    """Of the gathers: what can run under the rest of the backward."""
    reductions_under_backward: float = 0.0
    """Of the reduction: what can run under that."""
    cuts: tuple[Cut, ...] = ()
    """Moments of the backward that cannot come before what was gathered for them."""
    reductions_left: float = 0.0
    """Of the reduction: what has no backward left to run under, but a forward."""
    forward_after: float = 0.0
    """The part of that forward, from its beginning, which waits for no gather."""
    reductions_behind: float = 0.0
    """Of the reduction: what may be left when a backward ends that was shorter than it, and can run
    under the next pass's forward; 0: there is none, or ranks meet before they go on."""
    turn: float = 1.0
    """The part of the model, at its end, whose backward is over before gradients travel."""


def schedules(
    model: ModelProfile, stage: int, persistent: frozenset[int] = frozenset()
) -> tuple[CommunicationSchedule, CommunicationSchedule]:
    """What travels at a step's meetings: at all but one, and at the dearest.

    Where every pass reduces and nothing is gathered, that is the last one, with no forward after
    it; where units are gathered it is the first, to which those come that stay gathered (`kept`).
    """
    if stage == 3:
        first = frozenset(range(len(model.unit_numels)))
        return _of_gathered_units(model, first - persistent, persistent), _of_gathered_units(
            model, first, persistent
        )
    numels = units_of(model, stage)
    parts = [numel / model.numel for numel in numels]
    dearest = CommunicationSchedule(
        gathers=1.0 if stage == 0 else 0.0,
        # A buffer's sum is gathered while the next buffer is reduced.
        gathers_under_backward=sum(parts[2:]) if stage == 0 else 0.0,
        reductions_under_backward=sum(parts[1:]),
        turn=parts[-1],
    )
    if stage < 2:
        return dearest, dearest
    last_first = [
        part / buffers_of(numel)
        for numel, part in zip(numels, parts, strict=True)
        for _ in range(buffers_of(numel))
    ]
    behind = sum(last_first[: buffers_in_flight(model, stage)])
    return replace(dearest, reductions_behind=behind), dearest


def _of_gathered_units(
    model: ModelProfile, gathered: frozenset[int], persistent: frozenset[int]
) -> CommunicationSchedule:
    """Stage 3: a unit is gathered while the one before it runs, and again in the backward.

    The last unit is still there then, and residents stay until the pass is over, when they are
    reduced; so these are gathered once. The first unit that comes back travels under the last
    one's forward and backward.

    Args:
        model: whose units.
        gathered: units that are gathered in the forward.
        kept: units that are not gathered in the backward.
    """
    parts = [numel / model.numel for numel in model.unit_numels]
    resident = frozenset(model.resident_units)
    returning = [unit for unit in range(len(parts)) if unit not in resident]
    forward = sum(parts[unit] for unit in gathered)
    windows = list(_forward_windows(parts, gathered))
    if not returning:
        return CommunicationSchedule(gathers=forward, windows=tuple(windows))
    again = [unit for unit in returning[:-1] if unit not in persistent]
    early = parts[again[-1]] if again[-1:] == returning[-2:-1] and again else 0.0
    if early:
        windows.append(Window(early, parts[-1], parts[-1]))
    # When the first unit that returns is reduced, residents may be left to compute, or nothing.
    exposed = parts[returning[0]] if returning[0] == 0 else 0.0
    comes_back = sum(parts[unit] for unit in again)
    found = CommunicationSchedule(
        gathers=forward + comes_back,
        windows=tuple(windows),
        gathers_under_backward=comes_back - early,
        reductions_under_backward=1.0 - sum(parts[unit] for unit in resident) - exposed,
        turn=sum(parts[returning[-1] :]),
    )
    free = min(gathered, default=len(parts))  # units that stay: ranks go on into the next pass
    if free:
        left = 1.0 - found.reductions_under_backward
        found = replace(found, reductions_left=left, forward_after=sum(parts[:free]))
    return replace(found, cuts=tuple(_cuts(parts, returning, again)))


def _cuts(parts: Sequence[float], returning: list[int], again: list[int]) -> list[Cut]:
    """One for each gather under the backward, but for those that lie on a line between others.

    Where these are many, that of the last gather alone.
    """
    under_turn = returning[-2:-1]
    cuts = []
    for place, unit in enumerate(again):
        after = returning[returning.index(unit) + 1]  # its backward hides the gather
        cuts.append(
            Cut(
                gathers=sum(parts[one] for one in again[:place] if one not in under_turn),
                reductions=sum(parts[one] for one in returning if 0 < one <= after),
                backward=sum(parts[:after]),
            )
        )
    distinct = []
    for place, cut in enumerate(cuts):
        inner = 0 < place < len(cuts) - 1
        if not (inner and _between(cuts[place - 1], cut, cuts[place + 1])):
            distinct.append(cut)
    return distinct if len(distinct) <= _MOST_CUTS else distinct[:1]


def _between(one: Cut, cut: Cut, other: Cut) -> bool:
    """Whether a cut lies on the straight line from one to the other."""
    part = (cut.backward - one.backward) / (other.backward - one.backward)
    return all(
        abs(first + part * (last - first) - value) < _ROUNDING
        for first, value, last in zip(one, cut, other, strict=True)
    )


def _forward_windows(parts: Sequence[float], gathered: Container[int]) -> Iterator[Window]:
    """Each unit's forward hides the gather of the next; windows of one proportion are one.

    Where proportions are many, those that are most alike are taken together, whatever is gathered,
    so that to gather more never costs less.
    """
    pairs = sorted(enumerate(pairwise(parts), start=1), key=lambda pair: _proportion(pair[1]))
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: _proportion(pair[1]))]
    alike = len(groups) <= _MOST_WINDOWS
    while len(groups) > _MOST_WINDOWS:
        proportions = [_proportion(group[0][1]) for group in groups]
        apart = [after / before for before, after in pairwise(proportions)]
        at = apart.index(min(apart))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    for group in groups:
        arriving = [pair for unit, pair in group if unit in gathered]
        hiding = arriving if alike else [pair for _, pair in group]
        if arriving:
            gathers = sum(after for _, after in arriving)
            yield Window(gathers, sum(before for before, _ in hiding), 0.0)


def _proportion(pair: tuple[float, float]) -> float:
    """Of what travels to what is computed."""
    before, after = pair
    return after / before


def units_of(model: ModelProfile, stage: int) -> tuple[int, ...]:
    """Elements of what travels at once: units, where these are gathered.

    Elsewhere small neighbours are one, up to the size of a buffer.
    """
    if stage == 3:
        return model.unit_numels
    shared: list[int] = []
    for numel in model.unit_numels:
        if shared and shared[-1] + numel <= BUCKET_ELEMENTS:
            shared[-1] += numel
        else:
            shared.append(numel)
    return tuple(shared)


def buffers_of(numel: int) -> int:
    """As how many buffers a unit of this size is reduced."""
    return -(-numel // BUCKET_ELEMENTS)
