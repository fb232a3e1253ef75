"""Opens passes, and keeps the orders of collectives that the ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence

from poplar.comm import Control
from poplar.values.errors import OutOfOrder
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.passes.collective_order import CollectiveOrder, Slot, SlotKind, agreed_order
from poplar.zero.passes.collective_pass import CollectivePass, EngineParts, Mode, PassSettings
from poplar.zero.passes.recording_pass import FollowingPass, LeadingPass, RecordingPass
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class ReplayPass(CollectivePass):
    """A pass in an agreed order: units are unsharded before their use.

    It issues slots as far as this rank's own pass allows.
    """

    def __init__(self, parts: EngineParts, settings: PassSettings, order: CollectiveOrder) -> None:
        super().__init__(parts, settings)
        self._slots, self._prefetch = order.slots, order.prefetch
        self._cursor = 0
        """The next slot to issue."""
        self._entered = -1
        """The slot of the unit in use."""

    @property
    def _issued(self) -> Sequence[Slot]:
        return self._slots[: self._cursor]

    def unshard(self, unit: Unit) -> None:
        if not self._must_issue(unit):
            self._use(unit)
            return
        place = self._next_unshard(unit)
        for skipped in self._skipped_units(place):
            self._reshard(skipped)
        if not unit.resident:
            self._reshard_current()
            self._entered = place
        while self._cursor <= self._prefetch[place]:
            slot = self._slots[self._cursor]
            is_unshard = slot.kind is SlotKind.UNSHARD
            if not is_unshard and not self._backward_is_over(self._flats[slot.index]):
                if self._cursor > place:
                    break
                raise self._order_error(unit)
            self._issue(slot)
            self._cursor += 1
            is_skipped = is_unshard and self._cursor <= place
            if is_skipped and not self._units[slot.index].resident:
                self._reshard(self._units[slot.index])
        self._use(unit)

    def _next_unshard(self, unit: Unit) -> int:
        for place in range(self._entered + 1, len(self._slots)):
            slot = self._slots[place]
            if slot.kind is SlotKind.UNSHARD and slot.index == unit.index:
                return place
        raise self._order_error(unit)

    def _skipped_units(self, place: int) -> list[Unit]:
        """Units that were unsharded early for forward calls that this rank skips."""
        passed = (self._slots[at] for at in range(self._entered + 1, min(place, self._cursor)))
        units = (self._units[slot.index] for slot in passed if slot.kind is SlotKind.UNSHARD)
        return [unit for unit in units if not unit.resident and unit in self._unsharded]

    def _gradients_complete(self, flat: FlatParameter) -> None:
        while self._cursor < len(self._slots):
            slot = self._slots[self._cursor]
            if slot.kind is not SlotKind.REDUCE or self._flats[slot.index] not in self._complete:
                return
            self._issue(slot)
            self._cursor += 1

    def _issue_rest(self, *, failed: bool) -> None:
        while self._cursor < len(self._slots):
            self._issue(self._slots[self._cursor])
            self._cursor += 1


class CollectiveScheduler:
    """The passes of one engine, of which one at a time is open."""

    def __init__(self, units: Sequence[Unit], strategy: Strategy, control: Control) -> None:
        self._parts = EngineParts(units, strategy.sharded(units), strategy, control)
        self._recorded_orders: dict[tuple[Mode, bool], tuple[Slot, ...]] = {}
        self._orders: dict[tuple[Mode, bool, frozenset[Unit]], CollectiveOrder] = {}
        self._open: CollectivePass | None = None

    @property
    def active(self) -> bool:
        """Whether a pass is open."""
        return self._open is not None

    @property
    def current(self) -> CollectivePass:
        """The open pass.

        Raises:
            OutOfOrder: none is open.
        """
        if self._open is None:
            raise OutOfOrder(
                f"rank {self._parts.control.group.rank}: a backward reached units of a forward "
                "whose pass has ended; run one backward after each forward, before the next forward"
            )
        return self._open

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether such passes can run without a leader: the order is recorded, or not needed."""
        has_slots = reduces or bool(self._parts.sharded)
        return (mode, reduces) in self._recorded_orders or not has_slots

    def begin(self, settings: PassSettings, leader: int) -> None:
        """Open a pass. Collective if the pass has slots.

        Args:
            settings: what kind of pass it is.
            leader: the rank that broadcasts the order while none has been recorded.
        """
        if self.has_order(settings.mode, settings.reduces):
            order = self._order(settings.mode, settings.reduces)
            self._open = ReplayPass(self._parts, settings, order)
        elif leader == self._parts.control.group.rank:
            self._open = LeadingPass(self._parts, settings)
        else:
            self._open = FollowingPass(self._parts, settings, leader)

    def finish(self, *, failed: bool = False) -> None:
        """Finish the open pass and keep the order that it has recorded. Collective."""
        own = self.current
        own.finish(failed=failed)
        if isinstance(own, RecordingPass) and own.order is not None:
            self._recorded_orders[own.mode, own.reduces] = own.order
        self._open = None

    def drop(self) -> None:
        """Close the open pass, if there is one, without finishing it."""
        self._open = None

    def _order(self, mode: Mode, reduces: bool) -> CollectiveOrder:
        """The order for the persistent units of now; empty for passes without slots."""
        recorded = self._recorded_orders.get((mode, reduces))
        if recorded is None:
            return CollectiveOrder((), ())
        staying = self._parts.strategy.persistent if mode is Mode.TRAIN else frozenset()
        if (mode, reduces, staying) not in self._orders:
            sizes = [
                0 if u.resident or u in staying else u.unsharded_bytes for u in self._parts.units
            ]
            self._orders[mode, reduces, staying] = agreed_order(recorded, sizes)
        return self._orders[mode, reduces, staying]
