"""The interface of a ZeRO stage: where values, gradients and state are stored, and when they
are communicated.

The engine calls these methods in the same order on every rank. A strategy knows no stage number.

[Note: local parameters]
A rank may have parameters of its own, such as its part of a weight whose product the ranks divide
among them (`poplar.programmes.run`). Their flat parameters are `is_local`: each rank owns all of
its own (`layout`), whatever the shares; values, gradients and updates are not communicated.
Everything else is as for other flat parameters: weights of passes, norm, clipping, update.

[Note: differences]
Where parameters are not sharded and `Communication.parameters` compresses them, the owner of a
slice updates its masters in fp32. All ranks, the owner included, compute with the same other
values. After an update the owner encodes the difference of the two, and all ranks add what was
encoded. So the error of one step is part of the difference that the next step sends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from poplar import ops
from poplar.comm import Codec, Communicator, Encoded, Work
from poplar.comm.communicator import CallbackWork, own_slice
from poplar.comm.shard_layout import Layout
from poplar.values.communication import BITS, EXACT, Communication, Precision
from poplar.zero.checks.placeholder_gradient import put_back, replaced_after_the_passes
from poplar.zero.flat_parameter import FlatParameter, layout_on_rank
from poplar.zero.shard_cuts import layouts_under
from poplar.zero.stages.reduction import reductions_on
from poplar.zero.streams import DeviceClock, HostCopies, Timing, streams_of
from poplar.zero.unit import Unit

Layouts = dict[FlatParameter, Layout]
_ENCODED_AT_ONCE = 2
"""Updates in flight that take memory beside the parameters."""


class Strategy(ABC):
    """One ZeRO stage. Methods that communicate say `Collective`."""

    shards_parameters: ClassVar[bool]
    """Parameters are sharded, so a unit must be unsharded before it runs."""
    reduces_every_pass: ClassVar[bool]
    """Gradients are reduced in each pass, not only in a rank's last one."""
    allows_local: ClassVar[bool] = False
    """Parameters may be local: see [Note: local parameters]."""
    replicates_state: ClassVar[bool] = False
    """Every rank has the whole optimizer state and updates all parameters."""
    shows_gradients: ClassVar[bool] = False
    """`.grad` is the mean gradient between the last pass and the update."""

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype, device: torch.device) -> None:
        self.comm = comm
        self.codec = Codec(reduce_dtype)
        self.steps = 0
        """Steps that have ended on all ranks, which the rounding of gradients is seeded by."""
        self.communication = EXACT
        """The precision of what is sent."""
        self._numbers: dict[FlatParameter, int] = {}
        self._sent: Counter[FlatParameter] = Counter()
        """What this step has compressed so far of each flat parameter."""
        self.streams = streams_of(device, waits_on_stream=comm.waits_on_stream)
        if self.streams.asynchronous and comm.group.trace.clock is None:
            comm.group.trace.use_clock(DeviceClock(self.streams))
        self.timing = Timing(self.streams, comm.group.trace)
        self.reductions = reductions_on(self.streams, self.timing)
        self.updates_agree = True
        """Equal gradients give equal bits on all ranks, because they run the same kernels."""
        self.persistent: frozenset[Unit] = frozenset()
        """Persistent units: once unsharded, they stay so until the step's gradients are reduced.
        Unused where parameters are not sharded."""
        self.notes_writes = False
        self._allocated: set[FlatParameter] = set()
        self._started: set[FlatParameter] = set()
        """Those whose gradient has something of this step, to which later passes add."""

    def prepare(self, units: Sequence[Unit]) -> None:
        """Configure the strategy for the units of a model."""
        trained = (flat for unit in units for flat in unit.trained)
        self._numbers = {flat: number for number, flat in enumerate(trained)}

    def sharded(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """The units whose parameters are sharded: all, or none."""
        return tuple(units) if self.shards_parameters else ()

    def make_persistent(self, units: frozenset[Unit]) -> None:
        """Set the persistent units. Called between steps, equally on all ranks."""
        self.persistent = units

    def communicate(self, communication: Communication) -> None:
        """Set the precision of what is sent. Called between steps, equally on all ranks."""
        # A single rank sends nothing, so it adds no noise either.
        self.communication = communication if self.comm.group.size > 1 else EXACT

    @property
    def sends_updates(self) -> bool:
        """Whether each rank updates its share of parameters of which all ranks have all values."""
        return not (self.shards_parameters or self.replicates_state)

    @property
    def sends_differences(self) -> bool:
        """Whether updates are sent by [Note: differences]."""
        return self.sends_updates and self.communication.parameters != "exact"

    def next_codec(self, flat: FlatParameter, precision: Precision) -> Encoded | None:
        """How what is sent of `flat` next is compressed; None: not at all. Equal on all ranks."""
        self._sent[flat] += 1
        return self._codec(flat, precision, self._sent[flat])

    def _codec(self, flat: FlatParameter, precision: Precision, number: int) -> Encoded | None:
        """As `next_codec`, of what has this number in the step."""
        bits = BITS[precision]
        if not bits or self.steps < self.communication.warmup_steps:
            return None
        # Not by the order in which ranks send, which is another one in the first step of a run.
        seed = self._numbers[flat] + len(self._numbers) * number
        return Encoded(bits=bits, key=(self.steps << 32) + (seed << 12))

    def gather_updates(self) -> None:
        """Ranks run other kernels, so that equal gradients may give other bits there."""
        self.updates_agree = False

    def note_writes(self, notes: bool) -> None:
        """Whether to note what a forward has written into parameters that are sharded later."""
        self.notes_writes = notes

    def explain_error(self, error: Exception) -> Exception:
        """An error of a backward with its cause, where that is this strategy."""
        return error

    def layouts(self, flats: Mapping[FlatParameter, Sequence[float]]) -> Layouts:
        """How the flat parameters are divided under their shares, in the agreed order.

        A local one is all on this rank.
        """
        shared = {flat: shares for flat, shares in flats.items() if not flat.is_local}
        rank, size = self.comm.group.rank, self.comm.group.size
        local = {flat: layout_on_rank(flat, rank, size) for flat in flats if flat.is_local}
        layouts = {**layouts_under(shared), **local}
        return {flat: layouts[flat] for flat in flats}

    def hosted(
        self, layouts: Mapping[FlatParameter, Layout], part: float
    ) -> Iterator[FlatParameter]:
        """The first flat parameters that have `part` of the elements that this rank owns.

        `layouts` are those of the trained ones, in the order of all ranks.
        """
        bounds = [self.owned_part(each, self.comm.group.rank) for each in layouts.values()]
        numels = [stop - start for start, stop in bounds]
        missing = part * sum(numels)
        for flat, numel in zip(layouts, numels, strict=True):
            if missing > 0.0 and numel:
                yield flat
            missing -= numel

    def state_layout(self, flat: FlatParameter) -> Layout | None:
        """How optimizer state is divided; None: every rank has all of it, with the same bits."""
        return flat.layout if not (self.replicates_state and self.updates_agree) else None

    def owned_part(self, layout: Layout, rank: int) -> tuple[int, int]:
        """Start and end of the part whose optimizer state `rank` holds."""
        return layout.bounds(rank)

    def allocate(self, flat: FlatParameter, layout: Layout) -> None:
        """Set the layout of `flat` and allocate its values, all 0. Local."""
        low, high = owned = self.owned_part(layout, self.comm.group.rank)
        values = torch.zeros(flat.numel, dtype=flat.dtype, device=flat.device)
        flat.use_values(values, lasting=True)
        shard = flat.values[low:high]
        flat.divide(layout, owned, shard, self._new_master(flat, shard))

    def _new_master(self, flat: FlatParameter, shard: Tensor) -> Tensor | None:
        """Memory for fp32 values beside low-precision ones; None: there are none."""
        if not flat.has_masters:
            return None
        return torch.zeros(shard.shape, dtype=torch.float32, device=flat.device)

    def stored_values(self, flat: FlatParameter) -> tuple[Tensor, int]:
        """The values of `flat` that this rank stores, and the position of the first one."""
        return flat.values, 0

    def write_initial_values(self, flat: FlatParameter, start: int, data: Tensor) -> None:
        """Copy what this rank stores of the elements from `start` on from 1-D `data`. Local."""
        _copy_overlap(*self.stored_values(flat), data, start)
        if flat.master is not flat.shard:
            _copy_overlap(flat.master, flat.owned[0], data, start)

    def bind_parameters(self, flat: FlatParameter) -> None:
        """Give the user's parameters their values, or NaN while they are sharded. Local."""
        flat.attach_parameters()

    def change_layout(self, flat: FlatParameter, new: Layout, master: Tensor | None) -> None:
        """Change to layout `new`, with the resharded master. Collective, between steps.

        Where every rank has all values, only the views of the owned part change.
        """
        low, high = owned = new.bounds(self.comm.group.rank)
        flat.divide(new, owned, flat.values[low:high], master)
        self.free_gradient(flat)

    @abstractmethod
    def _new_gradient(self, flat: FlatParameter) -> Tensor:
        """Memory for the owned part of the mean gradient of this step."""

    def ensure_gradient(
        self, flat: FlatParameter, allocate: Callable[[], Tensor] | None = None
    ) -> None:
        """Allocate the gradient before the first write of a step, or let `allocate` make it."""
        if flat not in self._allocated:
            gradient = self._new_gradient(flat) if allocate is None else allocate()
            blocks = -(-flat.layout.size(self.comm.group.rank) // ops.ALIGNMENT)
            # NaN exposes a block that a transport does not fill.
            squares = torch.full((blocks,), math.nan, dtype=torch.float32, device=flat.device)
            flat.hold_gradient(gradient, squares)
            self._allocated.add(flat)

    def free_gradient(self, flat: FlatParameter) -> None:
        """Free the gradient after a step, so that forwards run without it."""
        flat.drop_gradient()
        self._allocated.discard(flat)

    def accumulate(self, flat: FlatParameter, weight: float) -> None:
        """Add the parameters' gradients, times `weight`, to this rank's accumulated gradient."""
        raise NotImplementedError(f"{type(self).__name__} reduces in every pass")

    @abstractmethod
    def reduce(self, flat: FlatParameter, weight: float) -> None:
        """Start to reduce the parameters' gradients, times `weight`, over all ranks. Collective.

        A rank without gradients contributes zeros.
        """

    def wait_for_reductions(self) -> None:
        """Wait until this rank's slice of the mean gradient is final. Collective."""
        self.reductions.finish()

    def finish_gradients(self, units: Sequence[Unit]) -> None:
        """After `wait_for_reductions`: wait until `flat.gradient` and `.grad` are final.

        Where `.grad` shows the gradient, it does not for `flat.removed`.
        """

    def begin_step(self) -> None:
        """Reset the state of a step. All ranks have left the previous step by now."""
        self.reductions.finish()  # of a step that was closed with an error
        self.timing.begin_step()
        self.comm.trim()
        self._sent.clear()
        self._started.clear()

    def continue_after(self, steps: int) -> None:
        """Count on from a step, of a checkpoint or of another engine."""
        self.steps = steps

    def end_step(self) -> None:
        """All ranks have applied a step, or skipped it."""
        self.steps += 1
        self.timing.end_step()
        self.comm.end_step()

    def all_gather_updated_parameters(self, units: Sequence[Unit]) -> None:
        """Send the updated shards to the ranks that read them. Collective."""
        flats = [flat for unit in units for flat in unit.trained if not flat.is_local]
        pending: deque[tuple[Work, str]] = deque()
        for flat in flats:
            what = f"the new values of {flat.name}"
            codec = self.next_codec(flat, self.communication.parameters)
            if codec is None or not flat.sends_differences:
                pending.append((self._send_values(flat, what), what))
            else:
                if len(pending) == _ENCODED_AT_ONCE:
                    self.timing.wait_for(*pending.popleft())
                work = self._gather_encoded(flat, codec, what, difference=True)
                pending.append((CallbackWork(work, flat.mark_sent), what))
        for work, what in pending:
            self.timing.wait_for(work, what)

    def gather_masters(self, units: Sequence[Unit]) -> None:
        """Give all ranks exact values instead of those of [Note: differences]. Collective."""
        for flat in (flat for unit in units for flat in unit.trained):
            if flat.sends_differences and not flat.is_local:
                what = f"the values of {flat.name}"
                self.timing.wait_for(self._send_values(flat, what), what)

    def _send_values(self, flat: FlatParameter, what: str) -> Work:
        if flat.sends_differences:
            flat.shard.copy_(flat.master)
            flat.mark_sent()
        return self.comm.all_gather(flat.values, flat.layout, what=what)

    def _gather_encoded(
        self, flat: FlatParameter, codec: Encoded, what: str, *, difference: bool
    ) -> Work:
        """All ranks, the owner included, get the values, or add the difference, that it encodes."""
        layout = codec.wire_layout(flat.layout)
        encoded = torch.empty(layout.numel, dtype=codec.wire_dtype, device=flat.device)
        own = own_slice(encoded, layout, self.comm.group.rank)
        encode_owned(codec, own, flat, flat.master - flat.shard if difference else flat.shard)
        gathered = self.comm.all_gather(encoded, layout, what=what)
        decode = partial(codec.decode, flat.values, encoded, accumulate=difference)
        return CallbackWork(gathered, decode)

    def copy_to_host(self, values: Sequence[Tensor]) -> HostCopies:
        """Start to copy what the host reads in an update."""
        return HostCopies(values, self.streams, self.comm.group, "the gradients of a step")

    def wait_for_readers(self, flat: FlatParameter) -> None:
        """Wait until no other rank reads `flat.shard`. Call it before writing to the shard."""

    def unshard(
        self, unit: Unit, *, in_step: bool, timed: bool = False, lasting: bool = False
    ) -> None:
        """Start to all-gather a unit's values. Collective.

        Args:
            in_step: this is a training pass, so a persistent unit stays unsharded.
            timed: the waits for it are part of the times of a step.
            lasting: tensors that the user keeps of the values stay valid after `reshard`.
        """

    def allocate_lasting(self, unit: Unit) -> None:
        """Allocate what `unshard(lasting=True)` needs. Local; `reshard` frees it."""

    def wait_for_unshard(self, unit: Unit) -> None:
        """Wait for the unit's values and attach its parameters to them."""

    def reshard(self, unit: Unit) -> None:
        """Free the unsharded values, except those of persistent units."""

    def take_noted_writes(self) -> list[str]:
        """Names of parameters whose unsharded values this rank's forwards have changed."""
        return []

    def reshard_persistent(self) -> None:
        """Reshard the persistent units, so that their next use unshards them again.

        All ranks call it at the same place in the collective order.
        """

    def scale_gradients(self, units: Sequence[Unit], factor: Tensor) -> bool:
        """Scale the final gradient now if the user can see it; False leaves it to the update."""
        return False

    def read_back_gradients(self, flat: FlatParameter) -> Set[int]:
        """Take over what the user has set `.grad` to; returns positions where that is None.

        The gradients there are set to 0, so that they have no part in the norm.

        Raises:
            RuntimeError: it is another tensor, although the gradient is not in `.grad`, or what it
                was before it was None in an earlier call.
        """
        replaced = flat.replaced_gradients()
        for position in flat.removed - replaced.keys() if flat.has_placeholders else ():
            raise put_back(self.comm.group.name, flat.names[position])
        for position, gradient in replaced.items():
            if gradient is not None:
                raise replaced_after_the_passes(self.comm.group.name, flat.names[position])
        for position in replaced.keys() - flat.removed:
            part = flat.owned_part(position)
            if part is not None:
                flat.gradient[part].zero_()
            flat.drop_squares()
        return flat.removed | replaced.keys()

    def store_values(self, flat: FlatParameter) -> None:
        """Copy values that the user wrote into the parameters to the shard."""
        self.wait_for_readers(flat)
        flat.shard.copy_(flat.values[flat.owned[0] : flat.owned[1]])


def encode_owned(codec: Encoded, target: Tensor, flat: FlatParameter, values: Tensor) -> None:
    """Encode values of the owned part, without the padding, whose noise no checkpoint has."""
    parts = [part for at in range(len(flat.parameters)) if (part := flat.owned_part(at))]
    offsets = [part.start for part in parts]
    codec.encode(target, [values[part] for part in parts], offsets, flat.owned[0])


def _copy_overlap(target: Tensor, target_start: int, source: Tensor, source_start: int) -> None:
    """Copy the elements that two 1-D pieces of one buffer have in common."""
    low = max(target_start, source_start)
    high = min(target_start + target.numel(), source_start + source.numel())
    if low < high:
        part = source[low - source_start : high - source_start]
        target[low - target_start : high - target_start].copy_(part)
