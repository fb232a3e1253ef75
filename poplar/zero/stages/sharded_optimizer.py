"""ZeRO-1: the optimizer state is sharded; gradients are reduced once per step.

Passes accumulate locally, as at stage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poplar.comm import Bucket, Codec, Communicator, Work
from poplar.comm.communicator import own_slice
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.strategy import Strategy


class LocalAccumulation(Strategy):
    """Each rank accumulates its weighted passes in fp32; its last pass reduces the sums.

    The transport sends from the accumulation buffer, and writes the result into this rank's slice
    of it.
    """

    shards_parameters = False
    reduces_every_pass = False

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(comm, reduce_dtype, device)
        self._sums: dict[FlatParameter, Bucket] = {}

    def accumulate(self, flat: FlatParameter, weight: float) -> None:
        gradients, offsets = flat.take_gradients(weight)
        self.ensure_gradient(flat)
        has_started = flat in self._started
        if gradients or not has_started:
            self._sums[flat].pack(gradients, offsets, weight, accumulate=has_started)
        self._started.add(flat)

    def reduce(self, flat: FlatParameter, weight: float) -> None:
        self.accumulate(flat, weight)
        if flat.is_local:
            flat.drop_squares()
            return
        codec = self.next_codec(flat, self.communication.gradients) or self.codec
        if codec.wire_dtype is not torch.float32 or self.comm.takes_memory:
            self.reductions.make_room()
        self.reductions.start(lambda: self._reduction(flat, codec))

    def free_gradient(self, flat: FlatParameter) -> None:
        super().free_gradient(flat)
        self._sums.pop(flat, None)

    def _reduction(self, flat: FlatParameter, codec: Codec) -> Work:
        bucket = sums = self._sums[flat]
        if codec.wire_dtype is not torch.float32:
            bucket = self.comm.buffer(flat.layout, codec.wire_dtype, flat.device, codec)
            bucket.pack([sums.data], [0], 1.0)
        own = own_slice(sums.data, flat.layout, self.comm.group.rank)
        what = f"the reduction of unit {flat.name}"
        return self.comm.reduce_scatter(
            bucket, own, accumulate=False, what=what, squares=flat.squares
        )

    def _allocate_sums(self, flat: FlatParameter) -> Bucket:
        if flat.is_local:  # nothing is sent from it
            data = torch.empty(flat.numel, dtype=torch.float32, device=flat.device)
            bucket = Bucket(data, flat.layout, Codec())
        else:
            bucket = self.comm.buffer(flat.layout, torch.float32, flat.device)
        self._sums[flat] = bucket
        return bucket


class ShardedOptimizer(LocalAccumulation):
    """Each rank holds the optimizer state of its share, and gets only that part of the gradient.

    After the update, the new values are all-gathered into the parameters of all ranks.
    """

    allows_local = True

    def _new_gradient(self, flat: FlatParameter) -> Tensor:
        sums = self._allocate_sums(flat)
        return own_slice(sums.data, flat.layout, self.comm.group.rank)
