"""Issues every collective of a pass once, in the agreed order, on every rank.

The engine reports which unit is needed next, which gradients are ready, and when the pass has ended
or failed. A rank without a backward issues the remaining slots with zeros in `finish`.
See [Note: collective order] in `collective_order.py` and [Note: backward order] below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from torch import Tensor, nn

from poplar.comm import Control
from poplar.system.out_of_memory import is_out_of_memory
from poplar.values.errors import OutOfOrder
from poplar.zero.collective_order import (
    CollectiveOrder,
    LeaderFailed,
    Slot,
    SlotKind,
    agreed_order,
)
from poplar.zero.flat_parameter import FlatParameter, sparse_gradient
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class Mode(Enum):
    """Passes of one mode share one collective order."""

    TRAIN = "training"
    EVALUATE = "evaluation"
    REDUCE_ONLY = "reduction-only"
    """No forward and no backward: gradients that are already in `.grad` are reduced."""
    MEASURE = "measured"
    """Forward and backward of the profiler: gradients are dropped and nothing is reduced."""

    @property
    def has_gradients(self) -> bool:
        """Whether such a pass contributes to the gradients of a step."""
        return self in (Mode.TRAIN, Mode.REDUCE_ONLY)


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
        self._flats = tuple(flat for unit in units for flat in unit.trained)
        self._unit_of = {flat: unit for unit in units for flat in unit.trained}
        self._number = {flat: number for number, flat in enumerate(self._flats)}
        self._recorded_orders: dict[tuple[Mode, bool], tuple[Slot, ...]] = {}
        self._orders: dict[tuple[Mode, bool, frozenset[Unit]], CollectiveOrder] = {}
        self.active = False
        self.mode = Mode.TRAIN
        self.reduces = False
        """The current or last pass reduces gradients."""
        self.interrupted_by: BaseException | None = None
        """An error while something was sent, so that the pass cannot be completed. Running out of
        memory is none: collectives allocate before they send."""

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether such passes can run without a leader: the order is recorded, or not needed."""
        has_slots = self._strategy.shards_parameters or reduces
        return (mode, reduces) in self._recorded_orders or not has_slots

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
        self._recording = not self.has_order(mode, reduces)
        order = self._order(mode, reduces)
        self._slots, self._prefetch = order.slots, order.prefetch
        self._cursor = 0
        self._entered = -1
        self._recorded: list[Slot] = []
        self._pending: Slot | None = None
        """Received or broadcast but not issued yet. Other ranks have issued it and wait for this
        rank, even after an error."""
        self._current: Unit | None = None
        self._unsharded: set[Unit] = set()
        self._ready: set[Unit] = set()
        self._forward_order: list[Unit] = []
        self._visited: set[Unit] = set()
        self._visits_with_backward: set[int] = set()
        self._first_visit: dict[Unit, int] = {}
        self._backward_visit: int | None = None
        self._outputs: set[tuple[object, int]] = set()
        self._ready_gradients: dict[FlatParameter, set[nn.Parameter]] = {}
        self._complete: set[FlatParameter] = set()
        self._reduced: set[FlatParameter] = set()
        self._all_unsharded = False
        """On the leader: its backward unshards no more units."""
        self._finishing = False
        self.interrupted_by = None

    @property
    def reduced(self) -> set[FlatParameter]:
        """The flat parameters whose reduction has been issued in this pass."""
        return self._reduced

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived in this pass."""
        return bool(self._ready_gradients)

    def set_weight(self, weight: float) -> None:
        """Set the weight of a pass that began before it was known; before its backward."""
        self._weight = weight

    def _order(self, mode: Mode, reduces: bool) -> CollectiveOrder:
        """The order for the persistent units of now; empty while none is recorded."""
        recorded = self._recorded_orders.get((mode, reduces))
        if recorded is None:
            return CollectiveOrder((), ())
        staying = self._strategy.persistent if mode is Mode.TRAIN else frozenset()
        if (mode, reduces, staying) not in self._orders:
            sizes = [0 if u.resident or u in staying else u.unsharded_bytes for u in self._units]
            self._orders[mode, reduces, staying] = agreed_order(recorded, sizes)
        return self._orders[mode, reduces, staying]

    # Events of this rank's own pass.

    def enter_forward(self, unit: Unit) -> int:
        """Unshard `unit` for its forward. Returns the number of this forward call."""
        self._broadcast_skipped(unit.index)
        try:
            self.require(unit)
        except OutOfOrder as error:
            if self._backward_visit is None:
                raise
            raise OutOfOrder(
                f"rank {self._control.group.rank}: a forward of unit {unit.name!r} after the "
                "backward of this micro-batch. Run one forward and one backward per micro-batch: "
                "add the losses first, or evaluate after step()"
            ) from error
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
        if self._recording and self._is_leader and self._is_first_visit(visit):
            self._all_unsharded = True
            for flat in self._flats:
                if self._unit_of[flat].resident and flat in self._complete:
                    self._broadcast_reduction(flat)

    def _is_first_visit(self, visit: int) -> bool:
        """Whether all earlier forward calls are of the root, which stays unsharded."""
        return all(unit.resident for unit in self._forward_order[:visit])

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
        if last is not None and last.index == unit.index:
            return  # still unsharded from its last slot
        self._reshard_current()
        self._broadcast_and_issue(Slot(kind, unit.index))
        self._reshard(unit)

    def require(self, unit: Unit) -> None:
        """Return when the parameters of `unit` are unsharded.

        Raises:
            OutOfOrder: the agreed order has no unshard of this unit left.
            LeaderFailed: the leader of the first pass failed before this unit.
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
        with self._unbroken():
            self._strategy.wait_for_unshard(unit)

    def gradient_ready(self, flat: FlatParameter, parameter: nn.Parameter) -> None:
        """Record that autograd has accumulated the gradient of a parameter of `flat`.

        Raises:
            RuntimeError: the flat parameter has been reduced already.
        """
        if flat in self._reduced:
            raise RuntimeError(
                f"rank {self._control.group.rank}: a parameter of unit {flat.name!r} got a "
                "gradient after the unit was reduced. Run one backward per micro-batch: add the "
                "losses first, and use activation checkpointing with use_reentrant=False"
            )
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise TypeError(sparse_gradient(flat, parameter))
        if not self.mode.has_gradients:
            parameter.grad = None
            if flat.rows is not None:
                flat.rows.drop_captured()
            return
        arrived = self._ready_gradients.setdefault(flat, set())
        arrived.add(parameter)
        if len(arrived) < len(flat.parameters) or flat in self._complete:
            return
        self._complete.add(flat)
        if not self.reduces:
            self._strategy.accumulate(flat, self._weight)
        elif not self._recording:
            self._issue_complete_reductions()
        elif self._is_leader and self._may_reduce_early(flat):
            self._broadcast_reduction(flat)

    def _may_reduce_early(self, flat: FlatParameter) -> bool:
        """Whether the leader may broadcast the reduction before the backward is over.

        The root's has to wait for the last unshard: on a rank that does not use all of the root,
        its gradients are complete only at the end, and must not delay unshards.
        """
        resident = self._unit_of[flat].resident and self._strategy.shards_parameters
        return not resident or self._all_unsharded

    def finish(self, *, failed: bool = False) -> None:
        """Issue the remaining slots, with zeros for missing gradients, and reshard all units.

        After a failure the units are resharded first: the remaining slots may need their memory.
        """
        self._finishing = True
        if failed:
            self._reshard_all()
        if not self.reduces and not self._strategy.shards_parameters:
            self._accumulate_rest(failed)
        elif self._recording:
            self._finish_recording(failed)
        else:
            while self._cursor < len(self._slots):
                self._issue(self._slots[self._cursor])
                self._cursor += 1
        self._reshard_all()
        self._outputs.clear()
        self.active = False

    def _accumulate_rest(self, failed: bool) -> None:
        for flat in self._flats:
            if failed:
                flat.drop_parameter_gradients()
            else:
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
            self._issue(slot)
            self._cursor += 1
            skipped = is_unshard and not only_if_complete and self._cursor <= place
            if skipped and not self._units[slot.index].resident:
                self._reshard(self._units[slot.index])

    def _issue_complete_reductions(self) -> None:
        while self._cursor < len(self._slots):
            slot = self._slots[self._cursor]
            if slot.kind is not SlotKind.REDUCE or self._flats[slot.index] not in self._complete:
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
            if slot.kind is SlotKind.ABANDON:
                raise LeaderFailed(
                    f"rank {self._control.group.rank}: rank {self._leader} broadcasts the order of "
                    "collectives in its first pass and failed in it; see the error on that rank"
                )
            if slot.kind is SlotKind.END:
                raise self._order_error(self._units[wanted.index])
            is_reduction = slot.kind is SlotKind.REDUCE
            if is_reduction and not self._backward_is_over(self._flats[slot.index]):
                raise self._order_error(self._units[wanted.index])
            self._issue_pending()
            if is_reduction:
                continue
            if slot.index == wanted.index:
                return
            if not self._units[slot.index].resident:
                self._reshard(self._units[slot.index])

    def _finish_recording(self, failed: bool) -> None:
        if self._is_leader:
            self._issue_pending()
            if not failed:
                if self._backward_visit is None and self.mode is not Mode.REDUCE_ONLY:
                    self._broadcast_skipped(len(self._units))
                if self.mode in (Mode.TRAIN, Mode.MEASURE):
                    self._broadcast_skipped_in_backward(-1)
                for flat in self._flats if self.reduces else ():
                    if flat not in self._reduced:
                        self._broadcast_reduction(flat)
            last = Slot(SlotKind.ABANDON if failed else SlotKind.END)
            with self._unbroken():
                self._control.broadcast_integer(last.encode())
                self._control.flush()
        else:
            while (last := self._receive_next()).kind not in (SlotKind.END, SlotKind.ABANDON):
                self._issue_pending()
        if last.kind is SlotKind.END:
            order = (*self._unneeded_resident(), *self._recorded)
            self._recorded_orders[self.mode, self.reduces] = order

    def _unneeded_resident(self) -> list[Slot]:
        """Slots of resident units that this pass did not need, as a forward of a part may not.

        They stay unsharded to the end of a pass, so later passes can unshard them first.
        """
        if not self._strategy.shards_parameters or self.mode is Mode.REDUCE_ONLY:
            return []
        needed = {slot.index for slot in self._recorded if slot.kind is not SlotKind.REDUCE}
        indices = [u.index for u in self._units if u.resident and u.index not in needed]
        return [Slot(SlotKind.UNSHARD, index) for index in indices]

    def _broadcast_reduction(self, flat: FlatParameter) -> None:
        self._broadcast_and_issue(Slot(SlotKind.REDUCE, self._number[flat]))

    def _broadcast_and_issue(self, slot: Slot) -> None:
        self._issue_pending()  # left over if a failed forward is repeated
        with self._unbroken():
            self._control.broadcast_integer(slot.encode())
        self._pending = slot
        self._issue_pending()

    def _issue_pending(self) -> None:
        if self._pending is not None:
            self._issue(self._pending)
            self._pending = None

    def _receive_next(self) -> Slot:
        if self._pending is None:
            with self._unbroken():
                self._pending = Slot.decode(self._control.receive_integer(self._leader))
        return self._pending

    # Issuing.

    def _issue(self, slot: Slot) -> None:
        with self._unbroken():
            if slot.kind is SlotKind.REDUCE:
                flat = self._flats[slot.index]
                self._strategy.reduce(flat, self._weight)
                self._reduced.add(flat)
            else:
                unit = self._units[slot.index]
                self._strategy.unshard(unit, in_step=self.mode is Mode.TRAIN)
                self._unsharded.add(unit)
                if self._finishing:
                    self._reshard(unit)
        self._recorded.append(slot)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """A context for what may not be repeated if it fails, because it may have been sent."""
        try:
            yield
        except BaseException as error:
            if not is_out_of_memory(error):
                self.interrupted_by = error
            raise

    def _backward_is_over(self, flat: FlatParameter) -> bool:
        """Whether `flat` gets no more gradients in this pass: [Note: backward order]."""
        unit = self._unit_of[flat]
        if self._finishing or flat in self._complete:
            return True
        if unit.resident or not self._strategy.shards_parameters:
            return False
        first = self._first_visit.get(unit)
        return first is None or (self._backward_visit is not None and first > self._backward_visit)

    def _reshard_current(self) -> None:
        if self._current is not None:
            self._reshard(self._current)
            self._current = None

    def _reshard_all(self) -> None:
        for unit in list(self._unsharded):
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if unit in self._unsharded:
            self._unsharded.discard(unit)
            self._ready.discard(unit)
            with self._unbroken():
                self._strategy.reshard(unit)

    def _order_error(self, unit: Unit) -> OutOfOrder:
        issued = self._slots[: self._cursor] if not self._recording else tuple(self._recorded)
        names = [self._units[slot.index].name for slot in issued if slot.kind is SlotKind.UNSHARD]
        return OutOfOrder(
            f"rank {self._control.group.rank}: the model reached unit {unit.name!r} in another "
            f"order than agreed in the first {self.mode.value} pass (so far agreed: "
            f"{', '.join(names[-6:])}). All ranks must run the same model in the same order; a "
            "unit may be skipped, not moved. If the order depends on the data, name a larger unit "
            "that contains these: HeteroZeroOptimizer(..., units=[...])"
        )
