"""Opens passes, and records the orders of collectives that the ranks agree on.

In the first pass of a mode the leader broadcasts each slot, and the other ranks receive it.
"""

from __future__ import annotations

from collections.abc import Sequence

from poplar.comm import Control
from poplar.values.errors import OutOfOrder
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.passes.collective_order import (
    CollectiveOrder,
    LeaderFailed,
    Slot,
    SlotKind,
    agreed_order,
)
from poplar.zero.passes.collective_pass import (
    CollectivePass,
    EngineParts,
    Mode,
    PassSettings,
    ReplayPass,
    running_backward,
)
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class RecordingPass(CollectivePass):
    """Records the slots that are issued, for later passes."""

    def __init__(self, parts: EngineParts, settings: PassSettings) -> None:
        super().__init__(parts, settings)
        self.order: tuple[Slot, ...] | None = None
        """What was recorded, at the end of a pass in which the leader did not fail."""
        self._pending: Slot | None = None
        """Received or broadcast but not issued yet. Other ranks have issued it and wait for this
        rank, even after an error."""

    def _issue_pending(self) -> None:
        if self._pending is not None:
            self._issue(self._pending)
            self._pending = None

    def _end(self, last: Slot | None) -> None:
        """End with the last slot, which is only broadcast."""
        if last is not None and last.kind is SlotKind.END:
            self.order = (*self._unneeded_resident(), *self._issued)

    def _unneeded_resident(self) -> list[Slot]:
        """Slots of resident units that this pass did not need, as a forward of a part may not.

        They stay unsharded to the end of a pass, so later passes can unshard them first.
        """
        if self.mode is Mode.REDUCE_ONLY:
            return []
        needed = {slot.index for slot in self._issued if slot.kind is not SlotKind.REDUCE}
        indices = [u.index for u in self._sharded if u.resident and u.index not in needed]
        return [Slot(SlotKind.UNSHARD, index) for index in indices]


class LeadingPass(RecordingPass):
    """The pass of the leader, whose model decides the order."""

    def __init__(self, parts: EngineParts, settings: PassSettings) -> None:
        super().__init__(parts, settings)
        self._number = {flat: number for number, flat in enumerate(self._flats)}
        self._visited: set[Unit] = set()
        self._visits_with_backward: set[int] = set()
        """The forward calls whose outputs may receive gradients, and have received none."""
        self._backward = -1
        """The last backward that has entered a unit."""
        self._left: list[FlatParameter] = []
        """Flat parameters of units that it has left before all their gradients arrived."""
        self._all_unsharded = False
        """The backward unshards no more units. False in one that accumulates nothing: the loss may
        run another forward after it."""
        self._last: Slot | None = None
        """The end of the pass, once it has been broadcast: no rank receives another slot then."""

    def unshard(self, unit: Unit) -> None:
        if self._backward_visit is None:
            self._broadcast_skipped(unit.index)
        if self._must_issue(unit):
            if not unit.resident:
                self._reshard_current()
            self._broadcast_and_issue(Slot(SlotKind.UNSHARD, unit.index))
        self._use(unit)

    def forward_began(self, unit: Unit) -> int:
        self._visited.add(unit)
        return super().forward_began(unit)

    def expect_backward(self, unit: Unit, visit: int) -> None:
        self._visits_with_backward.add(visit)
        super().expect_backward(unit, visit)

    def enter_backward(self, unit: Unit, visit: int) -> None:
        backward = running_backward()
        if backward != self._backward:  # the first one, or one after `autograd.grad` in the loss
            self._backward, self._backward_visit = backward, None
            self._left.clear()
        if self._backward_visit is None:
            self._broadcast_skipped(len(self._units))
        self._broadcast_skipped_in_backward(visit)
        super().enter_backward(unit, visit)
        self._visits_with_backward.discard(visit)
        # All earlier forward calls are of the root, which stays unsharded.
        if self._accumulates and all(each.resident for each in self._forward_order[:visit]):
            self._all_unsharded = True
            for flat in self._flats:
                is_complete = flat in self._complete and flat not in self.reduced
                if self._unit_of[flat].resident and is_complete:
                    self._broadcast_reduction(flat)

    @property
    def _accumulates(self) -> bool:
        """Whether a gradient has been accumulated in the backward, or in one that it has run."""
        return self._accumulated_in >= self._backward

    def _gradients_complete(self, flat: FlatParameter) -> None:
        """Broadcast the reduction, unless it has to wait.

        That of the root waits for the last unshard: on a rank that does not use all of the root,
        its gradients are complete only at the end, and must not delay unshards.

        Gradients that all ranks accumulate wait for the end, too. Other ranks receive the order
        after their backward, which may issue collectives of the model on the same communicator.
        """
        if not self._strategy.reduces_every_pass:
            return
        waits = self._sharded and self._unit_of[flat].resident
        if not waits or self._all_unsharded:
            self._broadcast_reduction(flat)

    def _issue_rest(self, *, failed: bool) -> None:
        if self._last is None:  # else the pass failed after its end
            self._issue_and_broadcast_rest(failed)
        self._end(self._last)

    def _issue_and_broadcast_rest(self, failed: bool) -> None:
        self._issue_pending()
        if not failed:
            if self._backward_visit is None and self.mode is not Mode.REDUCE_ONLY:
                self._broadcast_skipped(len(self._units))
            if self.mode in (Mode.TRAIN, Mode.MEASURE):
                self._broadcast_skipped_in_backward(-1)
            # In later passes, they are issued in the backward if they are recorded as completed.
            # What was not completed comes in the order of a backward, which may reach it later.
            for flat in (*self._complete, *reversed(self._flats)) if self.reduces else ():
                if flat not in self.reduced:
                    self._broadcast_reduction(flat)
        last = Slot(SlotKind.ABANDON if failed else SlotKind.END)
        with self._unbroken():
            self._control.broadcast_integer(last.encode())
            self._control.flush()
            self._last = last

    def _broadcast_skipped(self, index: int) -> None:
        """Broadcast units before `index` that the forward has skipped."""
        for unit in self._sharded[:index]:
            if not unit.resident and unit not in self._forward_order:
                self._issue_skipped(unit)
                self._forward_order.append(unit)

    def _broadcast_skipped_in_backward(self, visit: int) -> None:
        """Broadcast skipped units between the last backward call and this one.

        Also the reductions of units that the backward has left without all gradients, as of frozen
        parameters: in later passes, which may have them, they must not wait for the end. Once it
        has accumulated a gradient: a later backward may follow one that accumulates none.
        """
        order, last = self._forward_order, self._backward_visit
        for place in range(len(order) - 1 if last is None else last, visit, -1):
            unit = order[place]
            if unit.resident:
                continue
            if place != last:
                self._broadcast_if_skipped(unit, place)
            if self.reduces and unit not in order[:place]:
                self._left += reversed(unit.trained)
            if self._finishing or self._accumulates:
                for flat in self._left:
                    if flat not in self.reduced:
                        self._broadcast_reduction(flat)
                self._left.clear()

    def _broadcast_if_skipped(self, unit: Unit, place: int) -> None:
        """Broadcast a unit whose backward of a forward call this rank has not entered."""
        if unit not in self._visited:
            self._issue_skipped(unit)
        elif place in self._visits_with_backward or (
            unit.trained and unit not in self._first_visit
        ):
            # No gradient reached it on this rank, but other ranks may have one.
            self._issue_skipped(unit, SlotKind.UNSHARD)

    def _issue_skipped(self, unit: Unit, kind: SlotKind = SlotKind.SKIPPED) -> None:
        last = next(
            (slot for slot in reversed(self._issued) if slot.kind is not SlotKind.REDUCE), None
        )
        if last is not None and last.index == unit.index:
            return  # still unsharded from its last slot
        self._reshard_current()
        self._broadcast_and_issue(Slot(kind, unit.index))
        self._reshard(unit)

    def _broadcast_reduction(self, flat: FlatParameter) -> None:
        self._broadcast_and_issue(Slot(SlotKind.REDUCE, self._number[flat]))

    def _broadcast_and_issue(self, slot: Slot) -> None:
        self._issue_pending()  # left over if a failed forward is repeated
        with self._unbroken():
            self._control.broadcast_integer(slot.encode())
        self._pending = slot
        self._issue_pending()


class FollowingPass(RecordingPass):
    """The pass of another rank, which issues what the leader broadcasts."""

    def __init__(self, parts: EngineParts, settings: PassSettings, leader: int) -> None:
        super().__init__(parts, settings)
        self._leader = leader

    def unshard(self, unit: Unit) -> None:
        if self._must_issue(unit):
            self._issue_until(unit)
        self._use(unit)

    def _issue_until(self, unit: Unit) -> None:
        if not unit.resident:
            self._reshard_current()
        while True:
            slot = self._receive_next()
            if slot.kind is SlotKind.ABANDON:
                raise LeaderFailed(
                    f"rank {self._control.group.name}: rank "
                    f"{self._control.group.names[self._leader]} broadcasts the order of "
                    "collectives in its first pass and failed in it; see the error on that rank"
                )
            if slot.kind is SlotKind.END:
                raise self._order_error(unit)
            is_reduction = slot.kind is SlotKind.REDUCE
            if is_reduction and not self._backward_is_over(self._flats[slot.index]):
                raise self._order_error(unit)
            self._issue_pending()
            if is_reduction:
                continue
            if slot.index == unit.index:
                return
            # The leader waits for it, and a transport may need this rank's wait for that.
            other = self._units[slot.index]
            if other.resident:
                self._use(other)
            else:
                self._reshard(other)

    def _gradients_complete(self, flat: FlatParameter) -> None:
        """Nothing: the leader says when."""

    def _issue_rest(self, *, failed: bool) -> None:
        while (last := self._receive_next()).kind not in (SlotKind.END, SlotKind.ABANDON):
            self._issue_pending()
        self._end(last)

    def _receive_next(self) -> Slot:
        if self._pending is None:
            with self._unbroken():
                self._pending = Slot.decode(self._control.receive_integer(self._leader))
        return self._pending


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
        """The open pass; raises OutOfOrder if there is none."""
        if self._open is None:
            raise OutOfOrder(
                f"rank {self._parts.control.group.name}: a backward reached units of a forward "
                "whose pass has ended; run one backward after each forward, before the next forward"
            )
        return self._open

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether such passes can run without a leader: the order is recorded, or not needed."""
        has_slots = reduces or bool(self._parts.sharded)
        return (mode, reduces) in self._recorded_orders or not has_slots

    def begin(self, settings: PassSettings, leader: int) -> None:
        """Open a pass. Collective if the pass has slots.

        The leader broadcasts the order while none has been recorded.
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
