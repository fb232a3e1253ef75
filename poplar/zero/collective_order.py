"""The agreed order of unshards and reductions in a pass.

[Note: collective order]
Collectives match by the order in which ranks issue them, so all ranks must issue the same ones in
the same order, even a rank that has no samples, skips a layer or has failed. In the first pass of a
mode, the leader (the first rank with samples) broadcasts each slot when its own model needs it, and
the other ranks issue it too. The leader also broadcasts units that its own forward skipped, because
other ranks may need them. Later passes use the recorded order without a broadcast and issue each
unshard one step before its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


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
    """One unshard or reduction of one unit (by index)."""

    kind: SlotKind
    unit: int = 0

    def encode(self) -> int:
        return self.unit * len(SlotKind) + self.kind.value

    @classmethod
    def decode(cls, code: int) -> Slot:
        unit, kind = divmod(code, len(SlotKind))
        return cls(SlotKind(kind), unit)


def agreed_order(recorded: Sequence[Slot]) -> tuple[Slot, ...]:
    """The order of all later passes of a mode, from the slots of its first pass."""
    entered = {slot.unit for slot in recorded if slot.kind is SlotKind.UNSHARD}
    slots: list[Slot] = []
    last_unsharded = None
    for slot in recorded:
        if slot.kind is SlotKind.REDUCE:
            slots.append(slot)
        elif slot.unit != last_unsharded and (
            slot.kind is SlotKind.UNSHARD or slot.unit not in entered
        ):
            last_unsharded = slot.unit
            slots.append(Slot(SlotKind.UNSHARD, slot.unit))
    return _with_prefetch(slots)


def _with_prefetch(recorded: Sequence[Slot]) -> tuple[Slot, ...]:
    """Move each unshard before the reductions that precede it, so that it starts one step early.

    A recorded backward is `unshard 2, reduce 2, unshard 1, reduce 1`: unit 1 is needed when unit 2
    is over. If unshard 1 is issued before reduce 2, it overlaps with the backward of unit 2.
    """
    slots: list[Slot] = []
    delayed: list[Slot] = []
    for slot in recorded:
        if slot.kind is SlotKind.UNSHARD:
            slots += [slot, *delayed]
            delayed = []
        else:
            delayed.append(slot)
    return (*slots, *delayed)
