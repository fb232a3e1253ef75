"""The agreed order of unshards and reductions in a pass.

[Note: collective order]
Collectives match by the order in which ranks issue them, so all ranks must issue the same ones in
the same order, even a rank that has no samples, skips a layer or has failed. In the first pass of a
mode, the leader (the first rank with samples) broadcasts each slot when its own model needs it, and
the other ranks issue it too. The leader also broadcasts units that its own forward skipped, because
other ranks may need them. Later passes use the recorded order without a broadcast and issue
unshards before their use.

[Note: prefetch]
The unit in use and the units that are unsharded ahead of it never need more bytes than the two
largest units. So the next unit always fits, and several small ones do. Persistent units and the
root are not counted: their memory is held anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from poplar.values.errors import RankFailed


class LeaderFailed(RankFailed):
    """This rank cannot finish a first pass, because the leader has failed in it."""


class SlotKind(Enum):
    """What a slot issues. END and ABANDON are only broadcast."""

    UNSHARD = 0
    SKIPPED = 1
    """An unshard that only other ranks need: the leader skips the unit."""
    REDUCE = 2
    END = 3
    ABANDON = 4
    """The leader failed: it broadcasts no more slots, and the order of this pass is dropped."""


@dataclass(frozen=True)
class Slot:
    """The unshard of one unit or the reduction of one flat parameter."""

    kind: SlotKind
    index: int = 0
    """Of the unit; of the flat parameter, among all trained ones, for a reduction."""

    def encode(self) -> int:
        return self.index * len(SlotKind) + self.kind.value

    @classmethod
    def decode(cls, code: int) -> Slot:
        index, kind = divmod(code, len(SlotKind))
        return cls(SlotKind(kind), index)


@dataclass(frozen=True)
class CollectiveOrder:
    """The slots of every later pass of a mode."""

    slots: tuple[Slot, ...]
    prefetch: tuple[int, ...]
    """By slot: the last slot to issue when the unit of an unshard is used. Unshards among them are
    prefetched. For reductions, the slot itself."""


def agreed_order(recorded: Sequence[Slot], sizes: Sequence[int]) -> CollectiveOrder:
    """The order of all later passes of a mode, from the slots of its first pass.

    A recorded backward is `unshard 2, reduce 2, unshard 1, reduce 1`: unit 1 is needed when unit 2
    is over. With unshard 1 before reduce 2, it overlaps with the backward of unit 2.

    `sizes` are the bytes of each unit while it is unsharded; 0 for units that stay unsharded.
    """
    units, reductions = _uses_and_reductions(recorded)
    slots = list(reductions[0])
    position: list[int] = []  # of each use's slot
    last: dict[int, int] = {}
    for use, following in enumerate(reductions[1:]):
        for unit in units[len(position) : _window_end(units, use, sizes)]:
            position.append(len(slots))
            slots.append(Slot(SlotKind.UNSHARD, unit))
        last[position[use]] = position[-1]
        slots += following
    return CollectiveOrder(tuple(slots), tuple(last.get(at, at) for at in range(len(slots))))


def _uses_and_reductions(recorded: Sequence[Slot]) -> tuple[list[int], list[list[Slot]]]:
    """Units in the order of use, and the reductions before the first use and after each use."""
    entered = {slot.index for slot in recorded if slot.kind is SlotKind.UNSHARD}
    units: list[int] = []
    reductions: list[list[Slot]] = [[]]
    for slot in recorded:
        if slot.kind is SlotKind.REDUCE:
            reductions[-1].append(slot)
        elif slot.index != (units[-1] if units else None) and (
            slot.kind is SlotKind.UNSHARD or slot.index not in entered
        ):
            units.append(slot.index)
            reductions.append([])
    return units, reductions


def _window_end(units: Sequence[int], use: int, sizes: Sequence[int]) -> int:
    """The end of the uses that may be unsharded while `use` runs: [Note: prefetch]."""
    budget = sum(sorted(sizes)[-2:])
    end, held = use + 1, sizes[units[use]]
    while end < len(units) and units[end] not in units[use:end]:
        held += sizes[units[end]]
        if held > budget:
            break
        end += 1
    return end
