"""The transport for devices whose tensors the process group does not carry: by way of host memory.

Several ranks on one GPU (which NCCL refuses), GPUs beside a gloo group, devices of several vendors:
what travels is copied to the host, goes the way that ranks' host tensors go, shared memory on one
host, and is copied back. Slower than a link between devices, and always there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poplar import ops
from poplar.comm.bucket import Bucket
from poplar.comm.communicator import Communicator, Finished, Pending, own_slice
from poplar.comm.shard_layout import Layout

HOST = torch.device("cpu")


class StagedCommunicator(Communicator):
    """Uneven collectives of tensors on any device, in the order in which the host's are added."""

    name = "staged"

    def __init__(self, on_host: Communicator) -> None:
        """`on_host`: carries the copies."""
        super().__init__(on_host.group)
        self._on_host = on_host
        self.reduction_order = on_host.reduction_order

    def reduce_scatter(
        self,
        bucket: Bucket,
        out: Tensor,
        *,
        accumulate: bool,
        what: str,
        squares: Tensor | None = None,
    ) -> Pending:
        staged = self._staged(bucket)
        total = torch.empty(out.numel(), dtype=torch.float32, device=HOST)
        adding = self._on_host.reduce_scatter(staged, total, accumulate=False, what=what)

        def place() -> None:
            if accumulate:
                out.add_(total.to(out.device))
            else:
                out.copy_(total)
            if squares is not None:
                squares.copy_(ops.block_sums_of_squares(out))

        return Finished(adding, place)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Pending:
        staged = self._staged(bucket)
        adding = self._on_host.all_reduce(staged, what=what)
        return Finished(adding, lambda: _place(bucket.data, staged.data))

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Pending:
        mine = own_slice(data, layout, self.group.rank) if own is None else own
        staged = torch.empty(layout.numel, dtype=data.dtype, device=HOST)
        own_slice(staged, layout, self.group.rank).copy_(mine)
        gathering = self._on_host.all_gather(staged, layout, what=what)
        return Finished(gathering, lambda: _place(data, staged))

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        staged = data.to(HOST, copy=True)
        self._on_host.broadcast(staged, source, what=what)
        data.copy_(staged)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return self._on_host.reshard(shard.to(HOST), old, new, what=what).to(shard.device)

    def trim(self) -> None:
        self._on_host.trim()

    def _staged(self, bucket: Bucket) -> Bucket:
        """The bucket on the host, where its transport sends from."""
        staged = self._on_host.buffer(bucket.layout, bucket.data.dtype, HOST, bucket.codec)
        staged.before_writing()
        staged.data.copy_(bucket.data)
        return staged


def _place(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
