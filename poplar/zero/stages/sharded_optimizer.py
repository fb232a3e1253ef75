"""ZeRO-1: the optimizer state is sharded; gradients are reduced once per step."""

from __future__ import annotations

from poplar.comm.communicator import own_slice
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.stages.gradient_accumulation import LocalAccumulation


class ShardedOptimizer(LocalAccumulation):
    """Each rank holds the optimizer state of its share, and gets only that part of the gradient.

    After the update, the new values are all-gathered into the parameters of all ranks.
    """

    allows_local = True

    def _allocate_gradient(self, flat: FlatParameter) -> None:
        sums = self._allocate_sums(flat)
        flat.gradient = own_slice(sums.data, flat.layout, self.comm.group.rank)
