"""ZeRO-1: the optimizer state is sharded; gradients still meet once a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from poplar.comm.communicator import own_slice
from poplar.planning.layout import Layout
from poplar.zero.flat import Flat
from poplar.zero.replicated import Replicated
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit


class ShardedOptimizer(Replicated):
    """Each rank keeps the state of its share, so the reduction ends with the owners.

    After the step the owners' new values are gathered into everybody's parameters.
    """

    def layout_for(self, flat: Flat, shares: Sequence[float]) -> Layout:
        return Layout.from_shares(flat.numel, shares)

    def state_layout(self, flat: Flat, to: int) -> Layout:
        return flat.layout

    def relayout(self, flat: Flat, new: Layout, master: Tensor | None) -> None:
        """Every rank has all values; only the views of what it owns change."""
        low, high = flat.owned = new.bounds(self.comm.group.rank)
        flat.layout, flat.shard = new, flat.values[low:high]
        flat.master = flat.shard if master is None else master
        sums = self._allocate_sums(flat)
        flat.gradient = own_slice(sums.data, new, self.comm.group.rank)

    def adopt(self, flat: Flat, shares: Sequence[float]) -> None:
        layout = self.layout_for(flat, shares)
        self._take_values(flat, layout, owned=layout.bounds(self.comm.group.rank))
        if flat.trained:
            sums = self._allocate_sums(flat)
            flat.gradient = own_slice(sums.data, layout, self.comm.group.rank)

    def settle(self, units: Sequence[Unit]) -> None:
        Strategy.settle(self, units)

    def publish(self, units: Sequence[Unit]) -> None:
        self._gather_values(units)
