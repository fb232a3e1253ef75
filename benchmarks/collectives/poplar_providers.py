"""Poplar's transports, with ordinary tensors and with tensors that all ranks can read."""

from __future__ import annotations

import torch
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider
from poplar.comm import Bucket, Codec, Communicator
from poplar.comm.communicator import own_slice
from poplar.comm.host_memory.transport import SharedMemoryCommunicator

CPU = torch.device("cpu")


class PoplarProvider(Provider):
    """A `Communicator`; without zero-copy, inputs and results are ordinary tensors.

    Only shared memory has an all-reduce; the engine needs none.
    """

    def __init__(self, comm: Communicator, transport: str, *, zero_copy: bool = False) -> None:
        self.name = f"poplar {transport}{', zero-copy' if zero_copy else ''}"
        self.transport, self.zero_copy = transport, zero_copy
        self._comm = comm

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.operation == "reduce_scatter":
            return self._reduce_scatter(case, mine)
        if case.operation == "all_gather":
            return self._all_gather(case, mine)
        if isinstance(self._comm, SharedMemoryCommunicator):
            return self._all_reduce(self._comm, case, mine)
        return None

    def _bucket(self, case: Case) -> Bucket:
        codec = Codec(case.torch_dtype)
        if self.zero_copy:
            return self._comm.buffer(case.layout, case.torch_dtype, CPU, codec)
        return Bucket(torch.empty(case.layout.numel, dtype=case.torch_dtype), case.layout, codec)

    def _all_reduce(self, comm: SharedMemoryCommunicator, case: Case, mine: Tensor) -> Prepared:
        bucket = self._bucket(case)
        bucket.data.copy_(mine)

        def run() -> None:
            comm.all_reduce(bucket, what=str(case)).wait()

        return Prepared(run, lambda: bucket.data)

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
