"""Common to stages 0 and 1: passes accumulate locally, gradients are reduced once per step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from poplar.comm import Bucket, Communicator, Work
from poplar.comm.communicator import own_slice
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit


class LocalAccumulation(Strategy):
    """Each rank accumulates its weighted passes in fp32; its last pass reduces the sums.

    The transport sends from the accumulation buffer, and writes the result into this rank's slice
    of it.

    [Note: reductions during the backward]
    Ranks reach their last pass at different times, so a reduction may wait for a long time, and the
    next one may wait for its memory. On CUDA, reductions and their waits therefore use a separate
    stream, so that the backward continues; the gradients are already accumulated. Waits on the host
    block the backward, except with shared memory, where no wait is needed.
    """

    shards_parameters = False
    reduces_every_pass = False

    def __init__(self, comm: Communicator, reduce_dtype: torch.dtype) -> None:
        super().__init__(comm, reduce_dtype)
        self._sums: dict[FlatParameter, Bucket] = {}
        self._started: set[FlatParameter] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self._started.clear()
        self._drain_reductions()  # of a step that was closed with an error

    def accumulate(self, flat: FlatParameter, weight: float) -> None:
        gradients, offsets = flat.take_gradients(weight)
        self._ensure_gradient(flat)
        has_started = flat in self._started
        if gradients or not has_started:
            self._sums[flat].pack(gradients, offsets, weight, accumulate=has_started)
        self._started.add(flat)

    def reduce(self, flat: FlatParameter, weight: float) -> None:
        self.accumulate(flat, weight)
        with self._on_reduction_stream(flat.device):
            narrow = self.codec.wire_dtype is not torch.float32
            if narrow or self.comm.takes_memory:
                self._limit_in_flight()
            self._pending.append(self._reduction(flat, narrow=narrow))

    def wait_for_reductions(self, units: Sequence[Unit]) -> None:
        self._drain_reductions()
        super().wait_for_reductions(units)

    def free_gradient(self, flat: FlatParameter) -> None:
        super().free_gradient(flat)
        self._sums.pop(flat, None)

    def _reduction(self, flat: FlatParameter, *, narrow: bool) -> Work:
        bucket = sums = self._sums[flat]
        if narrow:
            bucket = self.comm.buffer(flat.layout, self.codec.wire_dtype, flat.device, self.codec)
            bucket.pack([sums.data], [0], 1.0)
        own = own_slice(sums.data, flat.layout, self.comm.group.rank)
        what = f"the reduction of unit {flat.name}"
        return self.comm.reduce_scatter(
            bucket, own, accumulate=False, what=what, squares=flat.squares
        )

    def _allocate_sums(self, flat: FlatParameter) -> Bucket:
        self._sums[flat] = self.comm.buffer(flat.layout, torch.float32, flat.device)
        return self._sums[flat]

    def _on_reduction_stream(self, device: torch.device) -> AbstractContextManager[object]:
        """A context for reductions and their waits, ordered after all work issued so far.

        It does not block the backward if the transport waits on CUDA streams.
        """
        if device.type != "cuda" or not self.comm.waits_on_stream:
            return nullcontext()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    def _drain_reductions(self) -> None:
        """Make the current stream wait for all reductions."""
        for device, stream in self._streams.items():
            with self._on_reduction_stream(device):
                self._drain(0)
            torch.cuda.current_stream(device).wait_stream(stream)
        self._drain(0)
