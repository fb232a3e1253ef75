"""The collective order of later passes, from the slots of the first pass."""

from __future__ import annotations

from poplar.zero.collective_order import Slot, SlotKind, agreed_order


def slots(text: str) -> list[Slot]:
    """`"g0 s1 r0"`: unshard unit 0, unshard unit 1 which the leader skips, reduce unit 0."""
    kinds = {"g": SlotKind.UNSHARD, "s": SlotKind.SKIPPED, "r": SlotKind.REDUCE}
    return [Slot(kinds[word[0]], int(word[1:])) for word in text.split()]


def agreed(text: str) -> str:
    names = {SlotKind.UNSHARD: "g", SlotKind.REDUCE: "r"}
    return " ".join(f"{names[slot.kind]}{slot.unit}" for slot in agreed_order(slots(text)))


def test_unshard_moves_before_reductions_of_previous_unit() -> None:
    """It overlaps with the backward of that unit."""
    assert agreed("g0 g1 g2 r2 g1 r1 g0 r0") == "g0 g1 g2 g1 r2 g0 r1 r0"


def test_unshard_moves_before_one_unit_only() -> None:
    """Gradients must not accumulate until the last unshard."""
    order = agreed("g3 r3 g2 r2 g1 r1 g0 r0").split()
    assert order == ["g3", "g2", "r3", "g1", "r2", "g0", "r1", "r0"]


def test_reductions_alone_keep_their_order() -> None:
    assert agreed("r2 r0 r1") == "r2 r0 r1"


def test_unit_skipped_by_leader_is_unsharded_for_other_ranks() -> None:
    assert agreed("g0 s1 g2 r2 s1 g0 r0 r1") == "g0 g1 g2 g1 r2 g0 r0 r1"


def test_skipped_unit_that_is_used_later_is_unsharded_once() -> None:
    """This happens if modules are registered in another order than they run."""
    assert agreed("s0 s1 g2 g0 g1 r1 g0 r0 g2 r2") == "g2 g0 g1 g0 r1 g2 r0 r2"


def test_unsharded_unit_is_not_unsharded_again() -> None:
    assert agreed("g0 g1 s2 r1 s2 g0 r0 r2") == "g0 g1 g2 g0 r1 r0 r2"


def test_slots_survive_encoding() -> None:
    for kind in SlotKind:
        for unit in (0, 1, 4095):
            assert Slot.decode(Slot(kind, unit).encode()) == Slot(kind, unit)
