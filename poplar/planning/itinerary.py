"""What travels at a meeting, and which part of it can run under which compute: by stage.

Units are reduced in the reverse of their order, each once its backward is over, so the last of them
has no backward left to run under, and none can travel before the first. Parts are fractions of the
model's elements: of its compute, and of a whole gather or reduction, alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from poplar.planning.cluster import ModelProfile
from poplar.planning.memory import BUCKET_ELEMENTS, buffers_in_flight

_MOST_WINDOWS = 3
"""Of a forward: units of more proportions than these are taken together, most alike first."""


class Window(NamedTuple):
    """Compute under which nothing but its own part of the gathers travels."""

    gathers: float
    """In whole gathers."""
    forward: float
    """In whole forwards."""
    backward: float
    """In whole backwards."""


@dataclass(frozen=True, slots=True)
class Itinerary:
    """Of one meeting, in whole gathers and whole reductions of the model; one reduction travels."""

    gathers: float = 0.0
    """That travel."""
    windows: tuple[Window, ...] = ()
    """What of the gathers can run under compute up to the last unit's backward."""
    gathers_under_backward: float = 0.0
    """Of the gathers: what can run under the rest of the backward."""
    reductions_under_backward: float = 0.0
    """Of the reduction: what can run under that."""
    reductions_after_gathers: float = 0.0
    """Of that: what is issued when nothing is left to gather."""
    backward_after_gathers: float = 0.0
    """The part of the backward, at its end, in which nothing is left to gather."""
    reductions_behind: float = 0.0
    """Of the reduction: what may be left when a backward ends that was shorter than it, and can run
    under the next pass's forward; 0: ranks meet before they go on."""
    turn: float = 1.0
    """The part of the model, at its end, whose backward is over before gradients travel."""


def itinerary(model: ModelProfile, stage: int) -> Itinerary:
    """What travels at a meeting of this stage."""
    if stage == 3:
        return _of_gathered_units(model)
    numels = units_of(model, stage)
    parts = [numel / model.numel for numel in numels]
    behind = 0.0
    if stage == 2:
        last_first = [
            part / buffers_of(numel)
            for numel, part in zip(numels, parts, strict=True)
            for _ in range(buffers_of(numel))
        ]
        behind = sum(last_first[: buffers_in_flight(model, stage)])
    return Itinerary(
        gathers=1.0 if stage == 0 else 0.0,
        # A buffer's sum is gathered while the next buffer is reduced.
        gathers_under_backward=sum(parts[2:]) if stage == 0 else 0.0,
        reductions_under_backward=sum(parts[1:]),
        reductions_behind=behind,
        turn=parts[-1],
    )


def _of_gathered_units(model: ModelProfile) -> Itinerary:
    """Stage 3: a unit is gathered while the one before it runs, and again in the backward.

    The last unit is still there then, and residents stay until the pass is over, when they are
    reduced; so these are gathered once. The first unit that comes back travels under the last
    one's forward and backward.
    """
    parts = [numel / model.numel for numel in model.unit_numels]
    resident = set(model.resident_units)
    returning = [unit for unit in range(len(parts)) if unit not in resident]
    if not returning:
        return Itinerary(gathers=1.0, windows=tuple(_forward_windows(parts)))
    again = [parts[unit] for unit in returning[:-1]]
    # When the first unit that returns is reduced, residents may be left to compute, or nothing.
    exposed = parts[returning[0]] if returning[0] == 0 else 0.0
    last_two = sum(parts[unit] for unit in returning[:2])
    return Itinerary(
        gathers=1.0 + sum(again),
        windows=(
            *_forward_windows(parts),
            *(Window(part, parts[-1], parts[-1]) for part in again[-1:]),
        ),
        gathers_under_backward=sum(again[:-1]),
        reductions_under_backward=1.0 - sum(parts[unit] for unit in resident) - exposed,
        reductions_after_gathers=last_two - exposed,
        backward_after_gathers=sum(parts[: returning[: 2][-1]]),
        turn=sum(parts[returning[-1] :]),
    )


def _forward_windows(parts: Sequence[float]) -> Iterator[Window]:
    """Each unit's forward hides the gather of the next; windows of one proportion are one."""
    pairs = sorted(pairwise(parts), key=_proportion)
    groups = [list(group) for _, group in groupby(pairs, key=_proportion)]
    while len(groups) > _MOST_WINDOWS:
        proportions = [_proportion(group[0]) for group in groups]
        apart = [after / before for before, after in pairwise(proportions)]
        at = apart.index(min(apart))
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    for group in groups:
        yield Window(sum(after for _, after in group), sum(before for before, _ in group), 0.0)


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
