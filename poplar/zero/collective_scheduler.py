"""The conductor: plays every slot of a pass once, in the agreed order, on every rank.

It is told what this rank's own pass demands (`need`), what is complete (`gradient_arrived`) and
when the pass is over or has failed (`finish`). A rank without a backward of its own goes straight
to `finish`, where the remaining slots are played with zeros. See [Note: one order for all] in
`schedule.py`, and [Note: backward order] below.
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
    """Passes of one mode share an order of slots."""

    TRAIN = "training"
    EVALUATE = "evaluation"
    REDUCE_ONLY = "reduction-only"
    """No forward and no backward: what lies in `.grad` is reduced."""


class CollectiveScheduler:
    """One per engine; `begin` and `finish` bracket a pass.

    [Note: backward order]
    Autograd runs what was recorded last first. When the backward enters the `v`-th visit of the
    forward, everything that was visited later is over: its parameters can be released, and a unit
    whose visits were all later gets no more gradients, whether or not each parameter got one.
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
        """The pass that is open, or was last, reduces gradients."""

    def has_order(self, mode: Mode, reduces: bool) -> bool:
        """Whether the order of such passes has been recorded, so that nobody has to lead."""
        return (mode, reduces) in self._orders or not (self._strategy.shards_parameters or reduces)

    def begin(self, mode: Mode, *, reduces: bool, weight: float, leader: int) -> None:
        """Open a pass. Collective where slots will be played.

        Args:
            reduces: gradients are reduced in this pass.
            weight: what this rank's gradients are multiplied by.
            leader: the rank that announces the order while none has been recorded.
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
        """Announced and not played yet: whatever fails meanwhile, others are waiting in it."""
        self._flats_issued = 0
        """Buffers of the reduction being played that are on their way: should the next one find no
        memory, they are not sent again."""
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

    # What this rank's own pass tells.

    def enter_forward(self, unit: Unit) -> int:
        """The forward enters `unit`: gather it; returns the number of this visit."""
        self._broadcast_skipped(unit.index)
        self.require(unit)
        self._visited.add(unit)
        self._forward_order.append(unit)
        return len(self._forward_order) - 1

    def expect_backward(self, unit: Unit, enter_forward: int) -> None:
        """A visit of the forward has given out tensors that may bring gradients back."""
        self._visits_with_backward.add(enter_forward)
        self._first_visit.setdefault(unit, enter_forward)

    def is_first_output(self, value: Tensor) -> bool:
        """Whether no unit has given this tensor out before in this pass."""
        # The objects themselves: they stay alive, so that no later one can be taken for them.
        key = (value if value.grad_fn is None else value.grad_fn, value.output_nr)
        if key in self._outputs:
            return False
        self._outputs.add(key)
        return True

    def enter_backward(self, unit: Unit, enter_forward: int) -> None:
        """The backward enters a visit of the forward."""
        if self._backward_visit is None:
            self._broadcast_skipped(len(self._units))
        self._broadcast_skipped_in_backward(enter_forward)
        self._backward_visit = enter_forward
        self.require(unit)

    def _broadcast_skipped(self, index: int) -> None:
        """As the leader: units before `index` in the module tree that this rank's forward skips."""
        if self._recording and self._is_leader and self._strategy.shards_parameters:
            for unit in self._units[:index]:
                if not unit.resident and unit not in self._forward_order:
                    self._issue_skipped(unit)
                    self._forward_order.append(unit)

    def _broadcast_skipped_in_backward(self, enter_forward: int) -> None:
        """As the leader: skipped units between the backward's last visit and this one."""
        if self._recording and self._is_leader and self._strategy.shards_parameters:
            last = (
                len(self._forward_order) if self._backward_visit is None else self._backward_visit
            )
            for place in range(last - 1, enter_forward, -1):
                unit = self._forward_order[place]
                if unit.resident:
                    continue
                if unit not in self._visited:
                    self._issue_skipped(unit)
                elif place in self._visits_with_backward or (
                    unit.trained and unit not in self._first_visit
                ):
                    # Nothing came back to it on this rank, but may on others.
                    self._issue_skipped(unit, SlotKind.UNSHARD)

    def _issue_skipped(self, unit: Unit, kind: SlotKind = SlotKind.SKIPPED) -> None:
        last = next(
            (slot for slot in reversed(self._recorded) if slot.kind is not SlotKind.REDUCE), None
        )
        if last is not None and last.unit == unit.index:
            return  # whoever needs it has it still
        self._reshard_current()
        self._broadcast_and_issue(Slot(kind, unit.index))
        self._reshard(unit)

    def require(self, unit: Unit) -> None:
        """`unit`'s parameters are read next: return when they are there.

        Raises:
            OutOfOrder: the agreed order has no gather of this unit left.
            RankFailed: the rank that leads the first pass has not come so far.
        """
        if unit in self._ready:
            return
        if unit in self._unsharded and unit.resident:
            pass  # came early, with those that were needed before it
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
        """Autograd has accumulated a parameter's gradient of this pass.

        Raises:
            RuntimeError: the unit has been reduced already.
        """
        if unit in self._reduced:
            raise RuntimeError(
                f"rank {self._control.group.rank}: a parameter of unit {unit.name!r} got a "
                "gradient after the unit was reduced. One backward per micro-batch, please: add "
                "the losses up first; and use activation checkpointing with use_reentrant=False"
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
            # A resident unit's reduction comes last: its backward may be over while others' units
            # that this rank skips are still to be gathered.
            self._broadcast_and_issue(Slot(SlotKind.REDUCE, unit.index))

    def finish(self, *, failed: bool = False) -> None:
        """Play what remains, with zeros for what never came, and release everything."""
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

    # The recorded order.

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
        """Units gathered early for visits that this rank's pass skips."""
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
            passed_over = slot.kind is SlotKind.UNSHARD and self._cursor <= place
            if passed_over and not self._units[slot.unit].resident:
                self._reshard(self._units[slot.unit])

    def _issue_complete_reductions(self) -> None:
        while self._cursor < len(self._slots):
            slot = self._slots[self._cursor]
            if slot.kind is not SlotKind.REDUCE or self._units[slot.unit] not in self._complete:
                return
            self._issue(slot)
            self._cursor += 1

    # The first pass: the leader announces, the others follow.

    def _receive_until(self, wanted: Slot) -> None:
        if self._is_leader:
            self._broadcast_and_issue(wanted)
            return
        while True:
            slot = self._receive_next()
            unit = self._units[slot.unit]
            if slot.kind is SlotKind.ABANDON:
                raise RankFailed(
                    f"rank {self._control.group.rank}: rank {self._leader}, which tells the others "
                    "in its first pass what comes next, did not finish it; look there for the cause"
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
            self._control.announce(last.encode())
            self._control.flush()
        else:
            while (last := self._receive_next()).kind not in (SlotKind.END, SlotKind.ABANDON):
                self._issue_pending()
        if last.kind is SlotKind.END:
            self._orders[self.mode, self.reduces] = agreed_order(self._recorded)

    def _broadcast_and_issue(self, slot: Slot) -> None:
        self._issue_pending()  # of a forward that failed and was tried again, say
        self._control.announce(slot.encode())
        self._pending = slot
        self._issue_pending()

    def _issue_pending(self) -> None:
        if self._pending is not None:
            self._issue(self._pending)
            self._pending = None

    def _receive_next(self) -> Slot:
        if self._pending is None:
            self._pending = Slot.decode(self._control.hear(self._leader))
        return self._pending

    # Playing.

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
        """No more gradients can come for `unit` in this pass: [Note: backward order]."""
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
        played = self._slots[: self._cursor] if not self._recording else tuple(self._recorded)
        names = [self._units[slot.unit].name for slot in played if slot.kind is SlotKind.UNSHARD]
        return OutOfOrder(
            f"rank {self._control.group.rank}: the model reached unit {unit.name!r} in another "
            f"order than agreed in the first {self.mode.value} pass (so far agreed: "
            f"{', '.join(names[-6:])}). All ranks must run the same model in the same order; a "
            "unit may be skipped, not moved. If the order depends on the data, name a larger unit "
            "that contains these: HeteroZeroOptimizer(..., units=[...])"
        )
