"""The collective order of later passes, from the slots of the first pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from poplar.zero.passes.collective_order import Slot, SlotKind, agreed_order


def slots(text: str) -> list[Slot]:
    """`"g0 s1 r0"`: unshard unit 0, unshard unit 1 which the leader skips, reduce unit 0."""
    kinds = {"g": SlotKind.UNSHARD, "s": SlotKind.SKIPPED, "r": SlotKind.REDUCE}
    return [Slot(kinds[word[0]], int(word[1:])) for word in text.split()]


def agreed(text: str, sizes: Sequence[int] = (1, 1, 1, 1)) -> str:
    names = {SlotKind.UNSHARD: "g", SlotKind.REDUCE: "r"}
    order = agreed_order(slots(text), sizes)
    return " ".join(f"{names[slot.kind]}{slot.index}" for slot in order.slots)


def prefetched(text: str, sizes: Sequence[int]) -> dict[int, list[int]]:
    """By use, the units that are unsharded while it runs, the unit in use included."""
    order = agreed_order(slots(text), sizes)
    uses = [at for at, slot in enumerate(order.slots) if slot.kind is SlotKind.UNSHARD]
    return {
        number: [order.slots[at].index for at in uses if place <= at <= order.prefetch[place]]
        for number, place in enumerate(uses)
    }


def test_unshard_moves_before_reductions_of_previous_unit() -> None:
    """It overlaps with the backward of that unit."""
    assert agreed("g0 g1 g2 r2 g1 r1 g0 r0") == "g0 g1 g2 g1 r2 g0 r1 r0"


def test_unshard_moves_before_one_unit_only() -> None:
    """Gradients must not accumulate until the last unshard."""
    order = agreed("g3 r3 g2 r2 g1 r1 g0 r0").split()
    assert order == ["g3", "g2", "r3", "g1", "r2", "g0", "r1", "r0"]


def test_small_units_are_prefetched_together() -> None:
    """As many bytes are unsharded as the two largest units have."""
    forward = "g0 g1 g2 g3 g4"
    assert prefetched(forward, (1, 1, 1, 3, 1)) == {
        0: [0, 1, 2],
        1: [1, 2],  # unit 3 would make 5 bytes, and the limit is 4
        2: [2, 3],
        3: [3, 4],
        4: [4],
    }
    assert agreed("g2 r2 g1 r1 g0 r0", (1, 1, 2)) == "g2 g1 r2 g0 r1 r0"
    assert agreed("g3 r3 g2 r2 g1 r1 g0 r0", (1, 1, 1, 2)) == "g3 g2 r3 g1 g0 r2 r1 r0"


def test_next_unit_is_always_prefetched() -> None:
    for sizes in itertools.product((1, 3, 8), repeat=4):
        windows = prefetched("g0 g1 g2 g3 g2 g1 g0", sizes)
        assert all(len(windows[use]) >= 2 for use in range(6))
        budget = sum(sorted(sizes)[-2:])
        assert all(sum(sizes[unit] for unit in window) <= budget for window in windows.values())


def test_units_that_stay_unsharded_do_not_count() -> None:
    assert prefetched("g0 g1 g2 g3", (0, 2, 0, 2))[0] == [0, 1, 2, 3]


def test_unit_in_use_is_not_prefetched_again() -> None:
    """Its memory is still read."""
    assert prefetched("g1 g2 g1 g2 g3", (8, 1, 1, 8))[0] == [1, 2]


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
