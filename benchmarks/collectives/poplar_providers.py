"""Poplar's transports, with ordinary tensors and with tensors that all ranks can read."""

from __future__ import annotations

import torch
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider
from poplar.comm import Bucket, Codec, Communicator
from poplar.comm.communicator import own_slice

CPU = torch.device("cpu")


class PoplarProvider(Provider):
    """A `Communicator`; without zero-copy, inputs and results are ordinary tensors.

    An all-reduce is a reduce-scatter and an all-gather, as at stage 0.
    """

    def __init__(self, comm: Communicator, transport: str, *, zero_copy: bool = False) -> None:
        self.name = f"poplar {transport}{', zero-copy' if zero_copy else ''}"
        self.transport, self.zero_copy = transport, zero_copy
        self._comm = comm

    def prepare(self, case: Case, mine: Tensor) -> Prepared:
        if case.operation == "reduce_scatter":
            return self._reduce_scatter(case, mine)
        if case.operation == "all_gather":
            return self._all_gather(case, mine)
        return self._all_reduce(case, mine)

    def _bucket(self, case: Case) -> Bucket:
        codec = Codec(case.torch_dtype)
        if self.zero_copy:
            return self._comm.buffer(case.layout, case.torch_dtype, CPU, codec)
        return Bucket(torch.empty(case.layout.numel, dtype=case.torch_dtype), case.layout, codec)

    def _all_reduce(self, case: Case, mine: Tensor) -> Prepared:
        summed = self._reduce_scatter(case, mine)
        whole = self._bucket(case).data
        own = own_slice(whole, case.layout, self._comm.group.rank)

        def run() -> None:
            summed.run()
            self._comm.wait_for_readers(whole)
            own.copy_(summed.result())
            self._comm.all_gather(whole, case.layout, what=str(case), own=own).wait()

        return Prepared(run, lambda: whole)

    def _reduce_scatter(self, case: Case, mine: Tensor) -> Prepared:
        bucket = self._bucket(case)
        bucket.data.copy_(mine)
        in_place = self.zero_copy and case.torch_dtype is torch.float32
        rank = self._comm.group.rank
        own = own_slice(bucket.data, case.layout, rank)
        out = own if in_place else torch.empty(case.layout.size(rank))

        def run() -> None:
            self._comm.reduce_scatter(bucket, out, accumulate=False, what=str(case)).wait()

        return Prepared(run, lambda: out)

    def _all_gather(self, case: Case, mine: Tensor) -> Prepared:
        whole = self._bucket(case).data
        own = own_slice(whole, case.layout, self._comm.group.rank) if self.zero_copy else mine
        own.copy_(mine)

        def run() -> None:
            self._comm.all_gather(whole, case.layout, what=str(case), own=own).wait()

        return Prepared(run, lambda: whole)
