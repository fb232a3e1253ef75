"""ZeRO-3: parameters are sharded too. A unit is unsharded to run and resharded afterwards.

[Note: persistent units]
No value changes within a step, so a persistent unit is unsharded once: at its first slot in a
training pass. Its later slots send nothing. This is the same on every rank, because every rank
issues every slot in one order, with or without samples or failures. The unit is resharded when the
gradients are reduced, before the update writes a shard, or when the step is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from poplar.comm import Communicator, Encoded
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.zero.flat_parameter import FlatParameter, adopt_data
from poplar.zero.stages.sharded_gradients import ShardedGradients
from poplar.zero.stages.strategy import encode_owned
from poplar.zero.unit import Unit


class ShardedParameters(ShardedGradients):
    """Between uses a rank stores only its slice of the values, where other ranks can read it.

    [Note: one storage]
    Autograd saves views of the weights for the backward. So the storage of a flat parameter is
    freed and allocated again, never replaced: views saved in the forward see the values unsharded
    in the backward. In between, the parameters are detached (`FlatParameter.detach_parameters`).

    [Note: lasting values]
    Outside of passes, in `full_parameters()`, a unit gets new memory instead, in which no graph has
    saved views. It is freed when the last tensor of it is, so a state dict that was taken inside
    the context keeps its values.
    """

    shards_parameters = True

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(comm, reduce_dtype, device)
        self._pending_unshards: dict[Unit, list[Callable[[], object]]] = {}
        """How to wait for each collective."""
        self._unsharded_persistent: dict[Unit, None] = {}
        """Persistent units that are unsharded in this step, in that order."""
        self._rounded: set[FlatParameter] = set()
        """Flat parameters whose unsharded values were compressed."""
        self._noted: dict[FlatParameter, Tensor] = {}
        """Whether each owned byte of the unsharded values has been changed since."""

    def allocate(self, flat: FlatParameter, layout: Layout) -> None:
        low, high = owned = self.owned_part(layout, self.comm.group.rank)
        values = torch.empty(flat.numel, dtype=flat.dtype, device=flat.device)
        flat.use_values(values, lasting=False)
        values.untyped_storage().resize_(0)
        shard = self.comm.share(torch.zeros(high - low, dtype=flat.dtype, device=flat.device))
        flat.divide(layout, owned, shard, self._new_master(flat, shard))

    def stored_values(self, flat: FlatParameter) -> tuple[Tensor, int]:
        return flat.shard, flat.owned[0]

    def bind_parameters(self, flat: FlatParameter) -> None:
        flat.detach_parameters()

    def change_layout(self, flat: FlatParameter, new: Layout, master: Tensor | None) -> None:
        what = f"moving unit {flat.name}"
        shard = self.comm.share(self.comm.reshard(flat.shard, flat.layout, new, what=what))
        flat.divide(new, new.bounds(self.comm.group.rank), shard, master)
        self.free_gradient(flat)

    def begin_step(self) -> None:
        """Also reshard persistent units, which an abandoned step leaves unsharded."""
        self.reshard_persistent()
        super().begin_step()

    def wait_for_reductions(self) -> None:
        self.reshard_persistent()
        super().wait_for_reductions()

    def unshard(
        self, unit: Unit, *, in_step: bool, timed: bool = False, lasting: bool = False
    ) -> None:
        if unit in self._unsharded_persistent:
            return
        # Allocate before sending: if memory runs out, the slot can be issued again.
        if lasting:
            self.allocate_lasting(unit)
        else:
            self.streams.allocate_unsharded(partial(_allocate_values, unit))
        pending = self._pending_unshards.setdefault(unit, [])
        for buffer in unit.buffers[len(pending) :]:  # not again what has been sent before
            what = f"the unshard of unit {unit.name}"
            flat = buffer if isinstance(buffer, FlatParameter) and buffer.trained else None
            codec = self._codec_of(flat) if in_step and flat is not None else None
            if flat is not None and codec is not None:
                self._rounded.add(flat)
                work = self._gather_encoded(flat, codec, what, difference=False)
            else:
                values, own = buffer.values, buffer.shard
                work = self.comm.all_gather(values, buffer.layout, what=what, own=own)
            pending.append(partial(self.timing.wait_for, work, what) if timed else work.wait)
        if in_step and unit in self.persistent:
            self._unsharded_persistent[unit] = None

    def _codec_of(self, flat: FlatParameter) -> Encoded | None:
        """How weights are compressed in this step: to the same bits whenever they are unsharded."""
        return self._codec(flat, self.communication.parameters, 0)

    def allocate_lasting(self, unit: Unit) -> None:
        for buffer in unit.buffers:
            if not buffer.has_lasting_values:  # it may be called again after an error
                buffer.use_lasting_values()

    def wait_for_unshard(self, unit: Unit) -> None:
        self._wait_for_pending(unit)
        for buffer in unit.buffers:
            buffer.attach_parameters()

    def _wait_for_pending(self, unit: Unit) -> None:
        """Wait until nothing more is written into the unsharded values of a unit.

        What it has not waited for, because of an error, stays pending, so that the memory to which
        it is written is not freed.
        """
        pending = self._pending_unshards.get(unit, [])
        while pending:
            pending[0]()
            del pending[0]
        self._pending_unshards.pop(unit, None)

    def reshard(self, unit: Unit) -> None:
        self._wait_for_pending(unit)
        if unit in self._unsharded_persistent:
            return
        for flat in unit.flats:
            if self.notes_writes and not flat.has_lasting_values:  # they are of no forward
                self._note_writes(flat)
            self._rounded.discard(flat)
        for buffer in unit.buffers:
            buffer.detach_parameters()
            if buffer.has_lasting_values:
                buffer.drop_lasting_values()
            else:
                buffer.values.untyped_storage().resize_(0)

    def _note_writes(self, flat: FlatParameter) -> None:
        """Compare the owned part of the unsharded values with the shard, from which it came."""
        replaced = flat.replaced()  # as if it had been written in place
        adopt_data([(flat, position) for position in replaced if flat.can_adopt(position)])
        low, high = flat.owned
        if low == high or not flat.values.untyped_storage().nbytes():
            return
        # Bits, because NaN differs from itself; by block, to keep little until the step ends.
        bits = torch.int32 if flat.dtype is torch.float32 else torch.int16
        differs = flat.values[low:high].view(bits) != self._sent_values(flat).view(bits)
        changed = differs.view(-1, ALIGNMENT).any(1)
        for position in replaced:
            part = None if flat.can_adopt(position) else flat.owned_part(position)
            if part is not None:
                changed[_blocks(part)] = True
        self._noted[flat] = self._noted[flat] | changed if flat in self._noted else changed

    def _sent_values(self, flat: FlatParameter) -> Tensor:
        """This rank's part of what was unsharded."""
        codec = self._codec_of(flat) if flat in self._rounded else None
        if codec is None:
            return flat.shard
        numel, sent = codec.wire_numel(flat.shard.numel()), torch.empty_like(flat.shard)
        encoded = torch.empty(numel, dtype=codec.wire_dtype, device=flat.device)
        encode_owned(codec, encoded, flat, flat.shard)
        codec.decode(sent, encoded)
        return sent

    def take_noted_writes(self) -> list[str]:
        noted, self._noted = self._noted, {}
        names = []
        for flat, on_device in noted.items():
            changed = on_device.tolist()  # one read per flat parameter: each waits for the device
            for position, name in enumerate(flat.names):
                part = flat.owned_part(position)
                if part is not None and any(changed[_blocks(part)]):
                    names.append(name)
        return names

    def explain_error(self, error: Exception) -> Exception:
        """Explain autograd's version error where its cause is a resharded parameter."""
        if "modified by an inplace operation" not in str(error):
            return error
        explained = RuntimeError(
            f"rank {self.comm.group.name}: the backward read parameters that have been updated "
            "since its forward, or while they were sharded (stage 3), before it reached their "
            "unit's outputs. Possible causes: (1) a graph from before an update: run a new forward "
            "after the step. (2) A loss stored in a module, a second-order gradient, or reentrant "
            "checkpointing: return such a loss as an output of the unit, name a larger unit that "
            "contains its use (units=[...]), or use stage 2. (3) The model changes a parameter in "
            f"place: {error}"
        )
        explained.__cause__ = error
        return explained

    def reshard_persistent(self) -> None:
        staying, self._unsharded_persistent = self._unsharded_persistent, {}
        for unit in staying:
            self.reshard(unit)

    def wait_for_readers(self, flat: FlatParameter) -> None:
        self.comm.wait_for_readers(flat.shard)

    def all_gather_updated_parameters(self, units: Sequence[Unit]) -> None:
        """Nothing to send: the next unshard sends the new shards."""


def _blocks(part: slice) -> slice:
    """The blocks of the owned part in which these elements are."""
    return slice(part.start // ALIGNMENT, -(-part.stop // ALIGNMENT))


def _allocate_values(unit: Unit) -> None:
    """Allocate the values that have no memory; it may be called again after an error."""
    for buffer in unit.buffers:
        storage = buffer.values.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(buffer.numel * buffer.values.element_size())
