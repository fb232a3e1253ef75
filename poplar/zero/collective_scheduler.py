"""Issues every collective of a pass once, in the agreed order, on every rank.

The engine reports which unit is needed next, which gradients are ready, and when the pass has ended
or failed. A rank without a backward issues the remaining slots with zeros in `finish`.
See [Note: collective order] in `collective_order.py` and [Note: backward order] below.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor, nn

from poplar.comm import Control
from poplar.errors import OutOfOrder, RankFailed
from poplar.zero.collective_order import Slot, SlotKind, agreed_order
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit


class Mode(Enum):
    """Passes of one mode share one collective order."""

    TRAIN = "training"
    EVALUATE = "evaluation"
    REDUCE_ONLY = "reduction-only"
    """No forward and no backward: gradients that are already in `.grad` are reduced."""


class CollectiveScheduler:
    """Issues the collectives between `begin` and `finish` of each pass.

    [Note: backward order]
    Autograd runs operations in reverse order of recording. When the backward enters forward call
    number `v`, all later forward calls are finished: their parameters can be resharded. A unit
    whose forward calls were all later gets no more gradients, even if a parameter got none.
    """

    def __init__(self, units: Sequence[Unit], strategy: Strategy, control: Control) -> None:
        self._units = units
        self._strategy = strategy
        self._control = control
        self._orders: dict[tuple[Mode, bool], tuple[Slot, ...]] = {}
        self._trained = {unit: sum(len(flat.parameters) for flat in unit.trained) for unit in units}
        self.active = False
        self.mode = Mode.TRAIN
        self.reduces = False
        """The current or last pass reduces gradients."""

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether such passes can run without a leader: the order is recorded, or not needed."""
        return (mode, reduces) in self._orders or not (self._strategy.shards_parameters or reduces)

    def begin(self, mode: Mode, *, reduces: bool, weight: float, leader: int) -> None:
        """Open a pass. Collective if the pass has slots.

        Args:
            reduces: whether gradients are reduced in this pass.
            weight: factor for this rank's gradients.
            leader: the rank that broadcasts the order while none has been recorded.
        """
        self.active = True
        self.mode = mode
        self.reduces = reduces
        self._weight = weight
        self._leader = leader
        self._is_leader = leader == self._control.group.rank
        order = self._orders.get((mode, reduces))
        self._recording = order is None and (self._strategy.shards_parameters or reduces)
        self._slots: tuple[Slot, ...] = order or ()
        self._cursor = 0
        self._entered = -1
        self._recorded: list[Slot] = []
        self._pending: Slot | None = None
        """Received or broadcast but not issued yet. Other ranks have issued it and wait for this
        rank, even after an error."""
        self._flats_issued = 0
        """Flat parameters of the current reduction that were already issued. If the next one runs
        out of memory, they are not issued again."""
        self._current: Unit | None = None
        self._unsharded: set[Unit] = set()
        self._ready: set[Unit] = set()
        self._forward_order: list[Unit] = []
        self._visited: set[Unit] = set()
        self._visits_with_backward: set[int] = set()
        self._first_visit: dict[Unit, int] = {}
        self._backward_visit: int | None = None
        self._outputs: set[tuple[object, int]] = set()
        self._ready_gradients: dict[Unit, set[nn.Parameter]] = {}
        self._complete: set[Unit] = set()
        self._reduced: set[Unit] = set()
        self._finishing = False

    # Events of this rank's own pass.

    def enter_forward(self, unit: Unit) -> int:
        """Unshard `unit` for its forward. Returns the number of this forward call."""
        self._broadcast_skipped(unit.index)
        self.require(unit)
        self._visited.add(unit)
        self._forward_order.append(unit)
        return len(self._forward_order) - 1

    def expect_backward(self, unit: Unit, visit: int) -> None:
        """Record that outputs of a forward call may receive gradients."""
        self._visits_with_backward.add(visit)
        self._first_visit.setdefault(unit, visit)

    def is_first_output(self, value: Tensor) -> bool:
        """Whether no unit has returned this tensor before in this pass."""
        # Store the objects, not their ids: an id may be reused after the object is freed.
        key = (value if value.grad_fn is None else value.grad_fn, value.output_nr)
        if key in self._outputs:
            return False
        self._outputs.add(key)
        return True

    def enter_backward(self, unit: Unit, visit: int) -> None:
        """Unshard `unit` for the backward of a forward call."""
        if self._backward_visit is None:
            self._broadcast_skipped(len(self._units))
        self._broadcast_skipped_in_backward(visit)
        self._backward_visit = visit
        self.require(unit)

    def _broadcast_skipped(self, index: int) -> None:
        """On the leader: broadcast units before `index` that its forward has skipped."""
        if self._recording and self._is_leader and self._strategy.shards_parameters:
            for unit in self._units[:index]:
                if not unit.resident and unit not in self._forward_order:
                    self._issue_skipped(unit)
                    self._forward_order.append(unit)

    def _broadcast_skipped_in_backward(self, visit: int) -> None:
        """On the leader: broadcast skipped units between its last backward call and this one."""
        if self._recording and self._is_leader and self._strategy.shards_parameters:
            last = (
                len(self._forward_order) if self._backward_visit is None else self._backward_visit
            )
            for place in range(last - 1, visit, -1):
                unit = self._forward_order[place]
                if unit.resident:
                    continue
                if unit not in self._visited:
                    self._issue_skipped(unit)
                elif place in self._visits_with_backward or (
                    unit.trained and unit not in self._first_visit
                ):
                    # No gradient reached it on this rank, but other ranks may have one.
                    self._issue_skipped(unit, SlotKind.UNSHARD)

    def _issue_skipped(self, unit: Unit, kind: SlotKind = SlotKind.SKIPPED) -> None:
        last = next(
            (slot for slot in reversed(self._recorded) if slot.kind is not SlotKind.REDUCE), None
        )
        if last is not None and last.unit == unit.index:
            return  # still unsharded from its last slot
        self._reshard_current()
        self._broadcast_and_issue(Slot(kind, unit.index))
        self._reshard(unit)

    def require(self, unit: Unit) -> None:
        """Return when the parameters of `unit` are unsharded.

        Raises:
            OutOfOrder: the agreed order has no unshard of this unit left.
            RankFailed: the leader of the first pass failed before this unit.
        """
        if unit in self._ready:
            return
        if unit in self._unsharded and unit.resident:
            pass  # was unsharded early, together with a unit that was needed before it
        elif self._recording:
            if not unit.resident:
                self._reshard_current()
            self._receive_until(Slot(SlotKind.UNSHARD, unit.index))
        else:
            self._issue_until(unit)
        if not unit.resident:
            self._current = unit
        self._ready.add(unit)
        self._strategy.wait_for_unshard(unit)

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Record that autograd has accumulated the gradient of a parameter in this pass.

        Raises:
            RuntimeError: the unit has been reduced already.
        """
        if unit in self._reduced:
            raise RuntimeError(
                f"rank {self._control.group.rank}: a parameter of unit {unit.name!r} got a "
                "gradient after the unit was reduced. Run one backward per micro-batch: add the "
                "losses first, and use activation checkpointing with use_reentrant=False"
            )
        arrived = self._ready_gradients.setdefault(unit, set())
        arrived.add(parameter)
        if len(arrived) < self._trained[unit] or unit in self._complete:
            return
        self._complete.add(unit)
        if not self.reduces:
            self._accumulate(unit)
        elif not self._recording:
            self._issue_complete_reductions()
        elif self._is_leader and not (unit.resident and self._strategy.shards_parameters):
            # The root is reduced last: its backward may be over on this rank while skipped units
            # still have to be unsharded for other ranks.
            self._broadcast_and_issue(Slot(SlotKind.REDUCE, unit.index))

    def finish(self, *, failed: bool = False) -> None:
        """Issue the remaining slots, with zeros for missing gradients, and reshard all units."""
        self._finishing = True
        if not self.reduces and not self._strategy.shards_parameters:
            self._accumulate_rest(failed)
        elif self._recording:
            self._finish_recording(failed)
        else:
            while self._cursor < len(self._slots):
                self._issue(self._slots[self._cursor])
                self._cursor += 1
        for unit in list(self._unsharded):
            self._reshard(unit)
        self._outputs.clear()
        self.active = False

    def _accumulate_rest(self, failed: bool) -> None:
        for unit in self._units:
            if failed:
                for flat in unit.trained:
                    flat.take_gradients(0.0)
            else:
                self._accumulate(unit)

    def _accumulate(self, unit: Unit) -> None:
        for flat in unit.trained:
            self._strategy.accumulate(flat, self._weight)

    # Passes with a recorded order.

    def _issue_until(self, unit: Unit) -> None:
        place = self._next_unshard(unit)
        for skipped in self._skipped_units(place):
            self._reshard(skipped)
        if not unit.resident:
            self._reshard_current()
            self._entered = place
        self._issue_through(place)
        following = self._unshard_after(place)
        if following is not None:
            self._issue_through(following, only_if_complete=True)

    def _next_unshard(self, unit: Unit) -> int:
        wanted = Slot(SlotKind.UNSHARD, unit.index)
        for place in range(self._entered + 1, len(self._slots)):
            if self._slots[place] == wanted:
                return place
        raise self._order_error(unit)

    def _skipped_units(self, place: int) -> list[Unit]:
        """Units that were unsharded early for forward calls that this rank skips."""
        passed = (self._slots[at] for at in range(self._entered + 1, min(place, self._cursor)))
        units = (self._units[slot.unit] for slot in passed if slot.kind is SlotKind.UNSHARD)
        return [unit for unit in units if not unit.resident and unit in self._unsharded]

    def _unshard_after(self, place: int) -> int | None:
        for later in range(place + 1, len(self._slots)):
            if self._slots[later].kind is SlotKind.UNSHARD:
                return later
        return None

    def _issue_through(self, place: int, *, only_if_complete: bool = False) -> None:
        while self._cursor <= place:
            slot = self._slots[self._cursor]
            if slot.kind is SlotKind.REDUCE and not self._backward_is_over(self._units[slot.unit]):
                if only_if_complete:
                    return
                raise self._order_error(self._units[self._slots[place].unit])
            self._issue(slot)
            self._cursor += 1
            skipped = slot.kind is SlotKind.UNSHARD and self._cursor <= place
            if skipped and not self._units[slot.unit].resident:
                self._reshard(self._units[slot.unit])

    def _issue_complete_reductions(self) -> None:
        while self._cursor < len(self._slots):
            slot = self._slots[self._cursor]
            if slot.kind is not SlotKind.REDUCE or self._units[slot.unit] not in self._complete:
                return
            self._issue(slot)
            self._cursor += 1

    # The first pass: the leader broadcasts the order, other ranks receive it.

    def _receive_until(self, wanted: Slot) -> None:
        if self._is_leader:
            self._broadcast_and_issue(wanted)
            return
        while True:
            slot = self._receive_next()
            unit = self._units[slot.unit]
            if slot.kind is SlotKind.ABANDON:
                raise RankFailed(
                    f"rank {self._control.group.rank}: rank {self._leader} broadcasts the order of "
                    "collectives in its first pass and failed in it; see the error on that rank"
                )
            if slot.kind is SlotKind.END:
                raise self._order_error(self._units[wanted.unit])
            if slot.kind is SlotKind.REDUCE and not self._backward_is_over(unit):
                raise self._order_error(self._units[wanted.unit])
            self._issue_pending()
            if slot.kind is not SlotKind.REDUCE and slot.unit == wanted.unit:
                return
            if slot.kind is not SlotKind.REDUCE and not unit.resident:
                self._reshard(unit)

    def _finish_recording(self, failed: bool) -> None:
        if self._is_leader:
            self._issue_pending()
            if not failed:
                if self._backward_visit is None and self.mode is not Mode.REDUCE_ONLY:
                    self._broadcast_skipped(len(self._units))
                if self.mode is Mode.TRAIN:
                    self._broadcast_skipped_in_backward(-1)
                for unit in self._units:
                    if self.reduces and unit.trained and unit not in self._reduced:
                        self._broadcast_and_issue(Slot(SlotKind.REDUCE, unit.index))
            last = Slot(SlotKind.ABANDON if failed else SlotKind.END)
            self._control.broadcast_integer(last.encode())
            self._control.flush()
        else:
            while (last := self._receive_next()).kind not in (SlotKind.END, SlotKind.ABANDON):
                self._issue_pending()
        if last.kind is SlotKind.END:
            self._orders[self.mode, self.reduces] = agreed_order(self._recorded)

    def _broadcast_and_issue(self, slot: Slot) -> None:
        self._issue_pending()  # left over if a failed forward is repeated
        self._control.broadcast_integer(slot.encode())
        self._pending = slot
        self._issue_pending()

    def _issue_pending(self) -> None:
        if self._pending is not None:
            self._issue(self._pending)
            self._pending = None

    def _receive_next(self) -> Slot:
        if self._pending is None:
            self._pending = Slot.decode(self._control.receive_integer(self._leader))
        return self._pending

    # Issuing.

    def _issue(self, slot: Slot) -> None:
        unit = self._units[slot.unit]
        if slot.kind is SlotKind.REDUCE:
            self._reduced.add(unit)
            for flat in unit.trained[self._flats_issued :]:
                self._strategy.reduce(flat, self._weight)
                self._flats_issued += 1
            self._flats_issued = 0
        else:
            self._strategy.unshard(unit, in_step=self.mode is Mode.TRAIN)
            self._unsharded.add(unit)
            if self._finishing:
                self._reshard(unit)
        self._recorded.append(slot)

    def _backward_is_over(self, unit: Unit) -> bool:
        """Whether `unit` gets no more gradients in this pass: [Note: backward order]."""
        if self._finishing or unit in self._complete:
            return True
        if unit.resident or not self._strategy.shards_parameters:
            return False
        first = self._first_visit.get(unit)
        return first is None or (self._backward_visit is not None and first > self._backward_visit)

    def _reshard_current(self) -> None:
        if self._current is not None:
            self._reshard(self._current)
            self._current = None

    def _reshard(self, unit: Unit) -> None:
        if unit in self._unsharded:
            self._unsharded.discard(unit)
            self._ready.discard(unit)
            self._strategy.reshard(unit)

    def _order_error(self, unit: Unit) -> OutOfOrder:
        issued = self._slots[: self._cursor] if not self._recording else tuple(self._recorded)
        names = [self._units[slot.unit].name for slot in issued if slot.kind is SlotKind.UNSHARD]
        return OutOfOrder(
            f"rank {self._control.group.rank}: the model reached unit {unit.name!r} in another "
            f"order than agreed in the first {self.mode.value} pass (so far agreed: "
            f"{', '.join(names[-6:])}). All ranks must run the same model in the same order; a "
            "unit may be skipped, not moved. If the order depends on the data, name a larger unit "
            "that contains these: HeteroZeroOptimizer(..., units=[...])"
        )
