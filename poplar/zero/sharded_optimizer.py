"""ZeRO-1: the optimizer state is sharded; gradients still meet once a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from poplar.comm.communicator import own_slice
from poplar.planning.layout import Layout
from poplar.zero.flat import Flat
from poplar.zero.local_sums import LocalSums
from poplar.zero.unit import Unit


class ShardedOptimizer(LocalSums):
    """Each rank keeps the state of its share, so the reduction ends with the owners.

    After the step the owners' new values are gathered into everybody's parameters.
    """

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

    def _allocate_gradient(self, flat: Flat) -> None:
        if flat.trained:
            sums = self._allocate_sums(flat)
            flat.gradient = own_slice(sums.data, flat.layout, self.comm.group.rank)

    def publish(self, units: Sequence[Unit]) -> None:
        self._gather_values(units)
