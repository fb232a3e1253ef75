"""What stages 0 and 1 share: passes add up on the rank, and gradients meet once a step."""

from __future__ import annotations

import torch

from poplar.comm import Bucket, Communicator
from poplar.comm.communicator import own_slice
from poplar.zero.flat import Flat
from poplar.zero.strategy import Strategy


class LocalSums(Strategy):
    """Each rank adds up its passes, weighted, in fp32; in its last pass the sums are reduced.

    The transport sends from the bucket that holds the sums, and what it reduces ends in the slice
    of it that the layout gives this rank.
    """

    gathers = False
    reduces_every_pass = False
    in_flight = 4

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        super().__init__(comm, reduce_dtype)
        self._sums: dict[Flat, Bucket] = {}
        self._started: set[Flat] = set()

    def begin_step(self) -> None:
        super().begin_step()
        self._started.clear()

    def accumulate(self, flat: Flat, weight: float) -> None:
        gradients, offsets = flat.take_gradients(weight)
        self._hold_gradient(flat)
        again = flat in self._started
        if gradients or not again:
            self._sums[flat].pack(gradients, offsets, weight, accumulate=again)
        self._started.add(flat)

    def reduce(self, flat: Flat, weight: float) -> None:
        self.accumulate(flat, weight)
        narrow = self.codec.wire_dtype is not torch.float32
        if narrow or self.comm.takes_memory:
            self._make_room()  # which may be a long wait for ranks whose last pass is short
        bucket = sums = self._sums[flat]
        if narrow:
            bucket = self.comm.buffer(flat.layout, self.codec.wire_dtype, flat.device, self.codec)
            bucket.pack([sums.data], [0], 1.0)
        own = own_slice(sums.data, flat.layout, self.comm.group.rank)
        what = f"the reduction of unit {flat.name}"
        self._pending.append(
            self.comm.reduce_scatter(bucket, own, accumulate=False, what=what, squares=flat.squares)
        )

    def drop_gradient(self, flat: Flat) -> None:
        super().drop_gradient(flat)
        self._sums.pop(flat, None)

    def _allocate_sums(self, flat: Flat) -> Bucket:
        self._sums[flat] = self.comm.buffer(flat.layout, torch.float32, flat.device)
        return self._sums[flat]
