"""ZeRO-3: parameters are sharded too; a unit's are gathered when it runs, and given back after.

[Note: kept units]
Within a step no value changes, so a unit that a plan keeps is gathered once: at its first slot in a
training pass. Its later slots send nothing, on every rank alike, since every rank plays every slot
in one order: what is there is a matter of that order, not of a rank's own samples or failures. It
goes when the step is settled, before the update writes a shard, or when the step is given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar.comm import Communicator, Work
from poplar.comm.shard_layout import Layout
from poplar.zero.flat_parameter import Flat
from poplar.zero.sharded_gradients import ShardedGradients
from poplar.zero.unit import Unit


class ShardedParameters(ShardedGradients):
    """Between uses a rank holds nothing but its slice of the values, where peers read it.

    [Note: one storage]
    Autograd saves views of the weights for the backward. So a buffer's storage is emptied and
    refilled, never replaced: what was saved in the forward sees the values gathered in the
    backward. Meanwhile the parameters themselves point elsewhere (`Flat.hide_values`).
    """

    gathers = True

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        super().__init__(comm, reduce_dtype)
        self._gathering: dict[Unit, list[Work]] = {}
        self._staying: dict[Unit, None] = {}
        """Kept units that have been gathered in this step; in that order."""

    def adopt(self, flat: Flat, shares: Sequence[float]) -> None:
        super().adopt(flat, shares)
        whole = flat.master.untyped_storage().data_ptr() == flat.shard.untyped_storage().data_ptr()
        flat.shard = self.comm.share(flat.shard)
        if whole:
            flat.master = flat.shard
        flat.hide_values()
        flat.values.untyped_storage().resize_(0)

    def relayout(self, flat: Flat, new: Layout, master: Tensor | None) -> None:
        what = f"moving unit {flat.name}"
        flat.shard = self.comm.share(self.comm.reshard(flat.shard, flat.layout, new, what=what))
        flat.master = flat.shard if master is None else master
        flat.layout, flat.owned = new, new.bounds(self.comm.group.rank)
        self.drop_gradient(flat)

    def begin_step(self) -> None:
        """Of a step that was given up, kept units are still there."""
        self.release_kept()
        super().begin_step()

    def settle(self, units: Sequence[Unit]) -> None:
        self.release_kept()
        super().settle(units)

    def gather(self, unit: Unit, *, in_step: bool) -> None:
        if unit in self._staying:
            return
        # All memory first: where it runs out, nothing has been sent, and the slot is played again.
        for flat in unit.flats:
            flat.values.untyped_storage().resize_(flat.numel * flat.values.element_size())
        pending: list[Work] = []
        for flat in unit.flats:
            what = f"the gather of unit {unit.name}"
            pending.append(
                self.comm.all_gather(flat.values, flat.layout, what=what, own=flat.shard)
            )
        self._gathering[unit] = pending
        if in_step and unit in self.persistent:
            self._staying[unit] = None

    def show(self, unit: Unit) -> None:
        for pending in self._gathering.pop(unit, ()):
            self.wait(pending)
        for flat in unit.flats:
            flat.show_values()

    def release(self, unit: Unit) -> None:
        for pending in self._gathering.pop(unit, ()):
            self.wait(pending)
        if unit in self._staying:
            return
        for flat in unit.flats:
            flat.hide_values()
            flat.values.untyped_storage().resize_(0)

    def release_kept(self) -> None:
        staying, self._staying = self._staying, {}
        for unit in staying:
            self.release(unit)

    def before_writing(self, flat: Flat) -> None:
        self.comm.wait_for_readers(flat.shard)

    def publish(self, units: Sequence[Unit]) -> None:
        """Nothing to bring anywhere: the next gather sends the new shards."""
