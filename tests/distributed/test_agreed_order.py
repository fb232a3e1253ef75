"""The order that later passes play, from what the leader announced in the first."""

from __future__ import annotations

from poplar.zero.collective_order import Slot, SlotKind, agreed_order


def slots(text: str) -> list[Slot]:
    """`"g0 s1 r0"`: gather unit 0, a gather that the leader skips, reduce unit 0."""
    kinds = {"g": SlotKind.UNSHARD, "s": SlotKind.SKIPPED, "r": SlotKind.REDUCE}
    return [Slot(kinds[word[0]], int(word[1:])) for word in text.split()]


def agreed(text: str) -> str:
    names = {SlotKind.UNSHARD: "g", SlotKind.REDUCE: "r"}
    return " ".join(f"{names[slot.kind]}{slot.unit}" for slot in agreed_order(slots(text)))


def test_a_gather_overtakes_the_reductions_of_the_unit_before_it() -> None:
    """So it runs under that unit's backward."""
    assert agreed("g0 g1 g2 r2 g1 r1 g0 r0") == "g0 g1 g2 g1 r2 g0 r1 r0"


def test_each_gather_overtakes_one_unit_only() -> None:
    """Gradients must not pile up until the last gather."""
    order = agreed("g3 r3 g2 r2 g1 r1 g0 r0").split()
    assert order == ["g3", "g2", "r3", "g1", "r2", "g0", "r1", "r0"]


def test_reductions_alone_keep_their_order() -> None:
    assert agreed("r2 r0 r1") == "r2 r0 r1"


def test_a_unit_that_the_leader_skips_is_gathered_for_those_that_do_not() -> None:
    assert agreed("g0 s1 g2 r2 s1 g0 r0 r1") == "g0 g1 g2 g1 r2 g0 r0 r1"


def test_a_unit_announced_as_skipped_and_entered_later_is_not_gathered_twice() -> None:
    """Modules that are registered in another order than they run in."""
    assert agreed("s0 s1 g2 g0 g1 r1 g0 r0 g2 r2") == "g2 g0 g1 g0 r1 g2 r0 r2"


def test_a_unit_that_is_held_is_not_gathered_again() -> None:
    assert agreed("g0 g1 s2 r1 s2 g0 r0 r2") == "g0 g1 g2 g0 r1 r0 r2"


def test_slots_survive_being_announced() -> None:
    for kind in SlotKind:
        for unit in (0, 1, 4095):
            assert Slot.decode(Slot(kind, unit).encode()) == Slot(kind, unit)
