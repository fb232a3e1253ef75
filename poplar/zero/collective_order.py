"""The schedule: the agreed order of gathers and reductions in a pass.

[Note: one order for all]
Collectives match by the order in which ranks issue them, so all ranks must issue the same ones in
the same order, even a rank that has no samples, skips a layer, or has failed. In the first pass of
a kind the leader (the first rank with samples) announces each slot as its own model demands it, and
the others follow; units that it passes by, going by the module tree, are announced too, for those
that don't. From then on the recorded order is everybody's: no announcements, and each gather is
issued one step ahead of its use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class SlotKind(Enum):
    """What is played in a slot; the last two are announcements only."""

    UNSHARD = 0
    SKIPPED = 1
    """A gather that the leader does not need: it skips the unit, others may not."""
    REDUCE = 2
    END = 3
    ABANDON = 4
    """The leader failed: nothing more will be announced, and nothing of this pass is recorded."""


@dataclass(frozen=True)
class Slot:
    """One gather or reduction of one unit (by index)."""

    kind: SlotKind
    unit: int = 0

    def encode(self) -> int:
        return self.unit * len(SlotKind) + self.kind.value

    @classmethod
    def decode(cls, code: int) -> Slot:
        unit, kind = divmod(code, len(SlotKind))
        return cls(SlotKind(kind), unit)


def agreed_order(recorded: Sequence[Slot]) -> tuple[Slot, ...]:
    """What all later passes of the kind play, from what was played in the first."""
    entered = {slot.unit for slot in recorded if slot.kind is SlotKind.UNSHARD}
    slots: list[Slot] = []
    gathered = None
    for slot in recorded:
        if slot.kind is SlotKind.REDUCE:
            slots.append(slot)
        elif slot.unit != gathered and (slot.kind is SlotKind.UNSHARD or slot.unit not in entered):
            gathered = slot.unit
            slots.append(Slot(SlotKind.UNSHARD, slot.unit))
    return _with_prefetch(slots)


def _with_prefetch(recorded: Sequence[Slot]) -> tuple[Slot, ...]:
    """Move each gather ahead of the reductions right before it, so that it starts one step early.

    A recorded backward reads `gather 2, reduce 2, gather 1, reduce 1`: the gather of 1 is demanded
    when 2 is over. Issued before `reduce 2` it runs under the backward of 2.
    """
    slots: list[Slot] = []
    overtaken: list[Slot] = []
    for slot in recorded:
        if slot.kind is SlotKind.UNSHARD:
            slots += [slot, *overtaken]
            overtaken = []
        else:
            overtaken.append(slot)
    return (*slots, *overtaken)
