"""ZeRO-1: the optimizer state is sharded; gradients still meet once a step."""

from __future__ import annotations

from poplar.comm.communicator import own_slice
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.gradient_accumulation import LocalAccumulation


class ShardedOptimizer(LocalAccumulation):
    """Each rank keeps the state of its share, so the reduction ends with the owners.

    After the step the owners' new values are gathered into everybody's parameters.
    """

    def _allocate_gradient(self, flat: FlatParameter) -> None:
        sums = self._allocate_sums(flat)
        flat.gradient = own_slice(sums.data, flat.layout, self.comm.group.rank)
