"""A pass of one rank, which issues every collective of the pass once, in the order of all ranks.

The engine reports which unit is needed next, which gradients are ready, and when the pass has ended
or failed. A rank without a backward issues the remaining slots with zeros in `finish`.
See [Note: collective order] in `collective_order.py` and [Note: backward order] below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.system.out_of_memory import is_out_of_memory
from poplar.values.errors import OutOfOrder
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.passes.collective_order import CollectiveOrder, Slot, SlotKind
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


@dataclass(frozen=True)
class EngineParts:
    """What the passes of one engine have in common."""

    units: Sequence[Unit]
    sharded: Sequence[Unit]
    """The units that must be unsharded before they run: all, or none."""
    strategy: Strategy
    control: Control


class PassSettings(NamedTuple):
    """What kind of pass it is."""

    mode: Mode
    reduces: bool
    """Gradients are reduced in this pass."""
    weight: float
    """Factor for this rank's gradients."""


def running_backward() -> int:
    """The number of the backward that autograd runs; -1: none. Later ones have larger numbers."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd is running, so that a forward is a recomputation."""
    return running_backward() != -1


class CollectivePass(ABC):
    """A pass, from its begin to `finish`.

    [Note: backward order]
    Autograd runs operations in reverse order of recording. When the backward enters forward call
    number `v`, all later forward calls are finished: their parameters can be resharded. A unit
    whose forward calls were all later gets no more gradients, even if a parameter got none.
    """

    def __init__(self, parts: EngineParts, settings: PassSettings) -> None:
        self.mode, self.reduces, self._weight = settings
        self.interrupted_by: BaseException | None = None
        """An error while something was sent, so that the pass cannot be completed. Running out of
        memory is none: collectives allocate before they send."""
        self._units, self._sharded = parts.units, parts.sharded
        self._strategy, self._control = parts.strategy, parts.control
        self._unit_of = {flat: unit for unit in parts.units for flat in unit.trained}
        self._flats = tuple(self._unit_of)
        self._current: Unit | None = None
        self._unsharded: set[Unit] = set()
        self._ready: set[Unit] = set()
        self._forward_order: list[Unit] = []
        """By number of a forward call, its unit."""
        self._first_visit: dict[Unit, int] = {}
        self._backward_visit: int | None = None
        self._accumulated_in = -1
        """The last backward that has accumulated a gradient: `autograd.grad` in a loss runs one
        that accumulates none."""
        self._outputs: set[tuple[object, int]] = set()
        self._ready_gradients: dict[FlatParameter, set[nn.Parameter]] = {}
        self._complete: dict[FlatParameter, None] = {}
        """The flat parameters whose gradients have all arrived, in this order."""
        self.reduced: set[FlatParameter] = set()
        """The flat parameters whose reduction has been issued in this pass."""
        self._issued: list[Slot] = []
        self._finishing = self._in_backward = False

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived in this pass."""
        return bool(self._ready_gradients)

    @property
    def has_backward(self) -> bool:
        """Whether a backward has reached this pass."""
        return self._in_backward or self._backward_visit is not None or self.has_gradients

    @property
    def packed(self) -> Collection[FlatParameter]:
        """The flat parameters whose gradients this pass has taken from `.grad`."""
        return self.reduced if self.reduces else self._complete

    def begin_backward(self) -> bool:
        """Note that a backward runs; returns whether it has just begun."""
        began, self._in_backward = not self._in_backward, True
        return began

    def end_backward(self) -> None:
        """Note that the backward is over; another one may follow in a loop of the user."""
        self._in_backward = False

    def set_weight(self, weight: float) -> None:
        """Set the weight of a pass that began before it was known; before its backward."""
        self._weight = weight

    # What differs between recording an order and replaying it.

    @abstractmethod
    def unshard(self, unit: Unit) -> None:
        """Issue slots until the parameters of `unit` are unsharded, and return when they are.

        It raises OutOfOrder if the agreed order has no unshard of this unit left, and LeaderFailed
        if the leader of the first pass failed before it.
        """

    @abstractmethod
    def _gradients_complete(self, flat: FlatParameter) -> None:
        """All gradients of a flat parameter have arrived, which this pass reduces."""

    @abstractmethod
    def _issue_rest(self, *, failed: bool) -> None:
        """Issue all slots that are left."""

    # Events of this rank's own pass.

    def forward_began(self, unit: Unit) -> int:
        """Record a forward call of an unsharded unit; returns its number."""
        self._forward_order.append(unit)
        return len(self._forward_order) - 1

    def expect_backward(self, unit: Unit, visit: int) -> None:
        """Record that outputs of a forward call may receive gradients."""
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
        self._backward_visit = visit
        self.unshard(unit)

    def gradient_ready(self, flat: FlatParameter, parameter: nn.Parameter) -> None:
        """Record that autograd has accumulated the gradient of a parameter of `flat`."""
        if flat in self.reduced or flat.has_placeholders:
            raise RuntimeError(
                f"rank {self._control.group.name}: a parameter of unit {flat.name!r} got a "
                "gradient after the unit was reduced. Run one backward per micro-batch: add the "
                "losses first, and use activation checkpointing with use_reentrant=False"
            )
        flat.check_gradients(parameter)
        self._accumulated_in = running_backward()
        if not self.mode.has_gradients:
            flat.drop_parameter_gradients()
            return
        arrived = self._ready_gradients.setdefault(flat, set())
        arrived.add(parameter)
        if len(arrived) < len(flat.parameters) or flat in self._complete:
            return
        self._complete[flat] = None
        if self.reduces:
            self._gradients_complete(flat)
        else:
            flat.accumulate(self._strategy, self._weight)

    def finish(self, *, failed: bool = False) -> None:
        """Issue the remaining slots, with zeros for missing gradients, and reshard all units.

        After a failure the units are resharded first: the remaining slots may need their memory.
        """
        self._finishing = True
        if failed:
            self._reshard_all()
        if self.reduces or not self.mode.has_gradients:
            self._issue_rest(failed=failed)
        else:
            for flat in self._flats:
                if failed:
                    flat.drop_parameter_gradients()
                else:
                    flat.accumulate(self._strategy, self._weight)
        self._reshard_all()
        self._outputs.clear()

    # Issuing.

    def _must_issue(self, unit: Unit) -> bool:
        """Whether slots must be issued before `unit` is used."""
        # A resident unit may come with one that was needed before it.
        return unit not in self._ready and not (unit.resident and unit in self._unsharded)

    def _use(self, unit: Unit) -> None:
        """Return when the unshard of `unit`, which has been issued, is over."""
        if unit in self._ready:
            return
        if not unit.resident:
            self._current = unit
        self._ready.add(unit)
        with self._unbroken():
            self._strategy.wait_for_unshard(unit)

    def _issue(self, slot: Slot) -> None:
        with self._unbroken():
            if slot.kind is SlotKind.REDUCE:
                flat = self._flats[slot.index]
                flat.reduce(self._strategy, self._weight)
                self.reduced.add(flat)
            else:
                unit = self._units[slot.index]
                if self._finishing:  # unsharded for a call that this rank has skipped
                    self._reshard(unit)
                in_step, timed = self.mode is Mode.TRAIN, self.mode is not Mode.EVALUATE
                self._strategy.unshard(unit, in_step=in_step, timed=timed)
                self._unsharded.add(unit)
                if self._finishing:
                    self._reshard(unit)
        self._issued.append(slot)

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
        if unit.resident or not self._sharded:
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
            with self._unbroken():
                self._strategy.reshard(unit)
            self._unsharded.discard(unit)
            self._ready.discard(unit)

    def _order_error(self, unit: Unit) -> OutOfOrder:
        if self._backward_visit is not None and not in_backward():
            if self._accumulated_in == -1:
                return OutOfOrder(
                    f"rank {self._control.group.name}: a forward of unit {unit.name!r} after "
                    "autograd.grad in this micro-batch, which the first pass did not have. Where "
                    "parameters are sharded (stage 3), a loss must call it in all passes, or in "
                    "none; else use stage 2"
                )
            return OutOfOrder(
                f"rank {self._control.group.name}: a forward of unit {unit.name!r} after the "
                "backward of this micro-batch. Run one forward and one backward per micro-batch: "
                "add the losses first, or evaluate after step()"
            )
        unshards = (slot for slot in self._issued if slot.kind is SlotKind.UNSHARD)
        names = [self._units[slot.index].name for slot in unshards]
        return OutOfOrder(
            f"rank {self._control.group.name}: the model reached unit {unit.name!r} in another "
            f"order than agreed in the first {self.mode.value} pass (so far agreed: "
            f"{', '.join(names[-6:])}). All ranks must run the same model in the same order; a "
            "unit may be skipped, not moved. If the data decide when a module runs, such as a "
            "vision tower that only batches with images use, leave it out of the units: name the "
            "others, HeteroZeroOptimizer(..., units=[DecoderLayer]). It then belongs to the root "
            "unit, which stays unsharded in a pass"
        )


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
