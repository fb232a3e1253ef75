"""ZeRO-2: a unit's gradients are reduced after its backward; each rank stores a slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar.comm import Work
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.strategy import Strategy
from poplar.zero.unit import Unit


class ShardedGradients(Strategy):
    """Every pass packs each unit's gradients, times the weight, into a bucket and reduces it.

    The sum, in fp32 and in rank order, is added to this rank's slice of the mean gradient. No rank
    ever stores a full gradient in fp32.
    """

    shards_parameters = False
    reduces_every_pass = True

    def prepare(self, units: Sequence[Unit]) -> None:
        """Allow all reductions of a unit at once, overlapping with the next unit's backward."""
        super().prepare(units)
        most = max((len(unit.trained) for unit in units), default=0)
        self.reductions.allow(1 + most)

    def reduce(self, flat: FlatParameter, weight: float) -> None:
        accumulate = flat in self._started
        self.reductions.make_room()
        gradients, offsets = flat.take_gradients(weight)
        codec = self.next_codec(flat, self.communication.gradients) or self.codec
        bucket = self.comm.buffer(flat.layout, codec.wire_dtype, flat.device, codec)
        bucket.pack(gradients, offsets, weight)
        del gradients  # free them before the next unit's gradients are allocated
        self.ensure_gradient(flat)
        self._started.add(flat)

        def issue() -> Work:
            what = f"the reduction of unit {flat.name}"
            return self.comm.reduce_scatter(
                bucket, flat.gradient, accumulate=accumulate, what=what, squares=flat.squares
            )

        self.reductions.start(issue, bucket)

    def _new_gradient(self, flat: FlatParameter) -> Tensor:
        own = flat.layout.size(self.comm.group.rank)
        return torch.empty(own, dtype=torch.float32, device=flat.device)
