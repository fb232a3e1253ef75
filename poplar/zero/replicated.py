"""ZeRO-0: every rank holds everything; gradients meet once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar.comm import Bucket, Communicator
from poplar.comm.communicator import own_slice
from poplar.planning.layout import Layout
from poplar.zero.flat import Flat
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit


class Replicated(Strategy):
    """Each rank adds up its passes, weighted, in fp32; in its last pass the sums are reduced.

    Reducing is a reduce-scatter over even slices and an all-gather, all within the accumulator, so
    the optimizer finds the mean gradient of the whole buffer, in the same bits on all ranks.
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

    def layout_for(self, flat: Flat, shares: Sequence[float]) -> Layout:
        """Even, whatever the shares: nothing is owned, so only the reduction is cut."""
        return Layout.even(flat.numel, self.comm.group.size)

    def state_layout(self, flat: Flat, to: int) -> Layout:
        size = self.comm.group.size
        return Layout(tuple(0 if rank <= to else flat.numel for rank in range(size + 1)))

    def relayout(self, flat: Flat, new: Layout, master: Tensor | None) -> None:
        raise AssertionError("the layout does not depend on the shares")

    def adopt(self, flat: Flat, shares: Sequence[float]) -> None:
        layout = self.layout_for(flat, shares)
        self._take_values(flat, layout, owned=(0, flat.numel))
        if flat.trained:
            flat.gradient = self._allocate_sums(flat).data

    def accumulate(self, flat: Flat, weight: float) -> None:
        gradients, offsets = flat.take_gradients()
        again = flat in self._started
        if gradients or not again:
            self._sums[flat].pack(gradients, offsets, weight, accumulate=again)
        self._started.add(flat)

    def reduce(self, flat: Flat, weight: float) -> None:
        self.accumulate(flat, weight)
        self._make_room()
        sums = self._sums[flat]
        bucket = sums
        if self.codec.wire_dtype is not torch.float32:
            bucket = self.comm.buffer(flat.layout, self.codec.wire_dtype, flat.device, self.codec)
            bucket.pack([sums.data], [0], 1.0)
        own = own_slice(sums.data, flat.layout, self.comm.group.rank)
        what = f"the reduction of unit {flat.name}"
        self._pending.append(self.comm.reduce_scatter(bucket, own, accumulate=False, what=what))

    def settle(self, units: Sequence[Unit]) -> None:
        super().settle(units)
        pending = [
            self.comm.all_gather(flat.gradient, flat.layout, what=f"the gradients of {unit.name}")
            for unit in units
            for flat in unit.trained
        ]
        for gather in pending:
            self.wait(gather)
        for unit in units:
            for flat in unit.trained:
                _show_gradients(flat)

    def publish(self, units: Sequence[Unit]) -> None:
        """Nothing to bring anywhere: every rank has updated all parameters, with the same bits."""

    def _allocate_sums(self, flat: Flat) -> Bucket:
        self._sums[flat] = self.comm.buffer(flat.layout, torch.float32, flat.device)
        return self._sums[flat]


def _show_gradients(flat: Flat) -> None:
    """Let `.grad` hold the mean gradient: the fp32 sums themselves where torch allows it.

    A parameter may say that its gradient has a dtype of its own; on versions of torch without that,
    one in low precision gets a rounded copy.
    """
    for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
        view = flat.gradient[offset : offset + parameter.numel()].view(parameter.shape)
        if flat.dtype is not torch.float32:
            if hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = None
            else:
                view = view.to(flat.dtype)
        parameter.grad = view
