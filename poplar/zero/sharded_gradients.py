"""ZeRO-2: a unit's gradients are reduced as soon as its backward is over; each rank keeps its
slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar.comm import Communicator
from poplar.planning.layout import Layout
from poplar.zero.flat import Flat
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit


class ShardedGradients(Strategy):
    """Every pass reduces every unit: packed with its weight into a bucket, sent, and forgotten.

    What arrives is added, in fp32 and in rank order, to the slice of the mean gradient that this
    rank owns; no rank ever holds a whole gradient in fp32.
    """

    gathers = False
    reduces_every_pass = True
    in_flight = 2

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        super().__init__(comm, reduce_dtype)
        self._started: set[Flat] = set()

    def begin_step(self) -> None:
        super().begin_step()
        self._started.clear()

    def layout_for(self, flat: Flat, shares: Sequence[float]) -> Layout:
        return Layout.from_shares(flat.numel, shares)

    def adopt(self, flat: Flat, shares: Sequence[float]) -> None:
        layout = self.layout_for(flat, shares)
        self._take_values(flat, layout, owned=layout.bounds(self.comm.group.rank))
        self._allocate_gradient(flat)

    def relayout(self, flat: Flat, new: Layout, master: Tensor | None) -> None:
        """Every rank has all values; only the views of what it owns change."""
        self._view_owned(flat, new, master)
        self._allocate_gradient(flat)

    def reduce(self, flat: Flat, weight: float) -> None:
        self._make_room()
        gradients, offsets = flat.take_gradients(weight)
        bucket = self.comm.buffer(flat.layout, self.codec.wire_dtype, flat.device, self.codec)
        bucket.pack(gradients, offsets, weight)
        del gradients  # the native gradients go before the next unit's come
        again = flat in self._started
        self._started.add(flat)
        what = f"the reduction of unit {flat.name}"
        self._pending.append(
            self.comm.reduce_scatter(bucket, flat.gradient, accumulate=again, what=what)
        )

    def _allocate_gradient(self, flat: Flat) -> None:
        if flat.trained:
            own = flat.layout.size(self.comm.group.rank)
            flat.gradient = torch.zeros(own, dtype=torch.float32, device=flat.device)

    def publish(self, units: Sequence[Unit]) -> None:
        self._gather_values(units)
