"""A pass whose order the ranks have agreed on: units are unsharded before their use."""

from __future__ import annotations

from collections.abc import Sequence

from poplar.comm import Control
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.passes.collective_order import CollectiveOrder, Slot, SlotKind
from poplar.zero.passes.collective_pass import CollectivePass, PassSettings
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class ReplayPass(CollectivePass):
    """Issues the slots of an order, as far as this rank's own pass allows."""

    def __init__(
        self,
        units: Sequence[Unit],
        strategy: Strategy,
        control: Control,
        settings: PassSettings,
        order: CollectiveOrder,
    ) -> None:
        super().__init__(units, strategy, control, settings)
        self._slots, self._prefetch = order.slots, order.prefetch
        self._cursor = 0
        """The next slot to issue."""
        self._entered = -1
        """The slot of the unit in use."""

    @property
    def _issued(self) -> Sequence[Slot]:
        return self._slots[: self._cursor]

    def _issue_until(self, unit: Unit) -> None:
        place = self._next_unshard(unit)
        for skipped in self._skipped_units(place):
            self._reshard(skipped)
        if not unit.resident:
            self._reshard_current()
            self._entered = place
        self._issue_through(place)
        self._issue_through(self._prefetch[place], only_if_complete=True)

    def _next_unshard(self, unit: Unit) -> int:
        wanted = Slot(SlotKind.UNSHARD, unit.index)
        for place in range(self._entered + 1, len(self._slots)):
            if self._slots[place] == wanted:
                return place
        raise self._order_error(unit)

    def _skipped_units(self, place: int) -> list[Unit]:
        """Units that were unsharded early for forward calls that this rank skips."""
        passed = (self._slots[at] for at in range(self._entered + 1, min(place, self._cursor)))
        units = (self._units[slot.index] for slot in passed if slot.kind is SlotKind.UNSHARD)
        return [unit for unit in units if not unit.resident and unit in self._unsharded]

    def _issue_through(self, place: int, *, only_if_complete: bool = False) -> None:
        while self._cursor <= place:
            slot = self._slots[self._cursor]
            is_unshard = slot.kind is SlotKind.UNSHARD
            if not is_unshard and not self._backward_is_over(self._flats[slot.index]):
                if only_if_complete:
                    return
                raise self._order_error(self._units[self._slots[place].index])
            self._issue_next()
            skipped = is_unshard and not only_if_complete and self._cursor <= place
            if skipped and not self._units[slot.index].resident:
                self._reshard(self._units[slot.index])

    def _gradients_complete(self, flat: FlatParameter) -> None:
        while self._cursor < len(self._slots):
            slot = self._slots[self._cursor]
            if slot.kind is not SlotKind.REDUCE or self._flats[slot.index] not in self._complete:
                return
            self._issue_next()

    def _issue_rest(self, *, failed: bool) -> None:
        while self._cursor < len(self._slots):
            self._issue_next()

    def _issue_next(self) -> None:
        self._issue(self._slots[self._cursor])
        self._cursor += 1
