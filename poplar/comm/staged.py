"""The transport for devices that the process group does not support: staging through host memory.

Examples: several ranks on one GPU (which NCCL refuses), GPUs with a gloo group, devices of several
vendors. Data is copied to the host, sent by the host's transport (shared memory on one host), and
copied back. Slower than a device-to-device link, and always available.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poplar import ops
from poplar.comm.bucket import Bucket
from poplar.comm.communicator import CallbackWork, Communicator, Work, own_slice
from poplar.comm.shard_layout import Layout

HOST = torch.device("cpu")


class StagedCommunicator(Communicator):
    """Uneven collectives of tensors on any device, in the reduction order of the host transport."""

    name = "staged"

    def __init__(self, on_host: Communicator) -> None:
        """`on_host`: the transport for the copies on the host."""
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
    ) -> Work:
        staged = self._copy_to_host(bucket)
        total = torch.empty(out.numel(), dtype=torch.float32, device=HOST)
        work = self._on_host.reduce_scatter(staged, total, accumulate=False, what=what)

        def copy_back() -> None:
            if accumulate:
                out.add_(total.to(out.device))
            else:
                out.copy_(total)
            if squares is not None:
                squares.copy_(ops.block_sums_of_squares(out))

        return CallbackWork(work, copy_back)

    def all_reduce(self, bucket: Bucket, *, what: str) -> Work:
        staged = self._copy_to_host(bucket)
        work = self._on_host.all_reduce(staged, what=what)
        return CallbackWork(work, lambda: _copy(bucket.data, staged.data))

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        own = own_slice(data, layout, self.group.rank) if own is None else own
        staged = torch.empty(layout.numel, dtype=data.dtype, device=HOST)
        own_slice(staged, layout, self.group.rank).copy_(own)
        work = self._on_host.all_gather(staged, layout, what=what)
        return CallbackWork(work, lambda: _copy(data, staged))

    def broadcast(self, data: Tensor, source: int, *, what: str) -> None:
        staged = data.to(HOST, copy=True)
        self._on_host.broadcast(staged, source, what=what)
        data.copy_(staged)

    def reshard(self, shard: Tensor, old: Layout, new: Layout, *, what: str) -> Tensor:
        return self._on_host.reshard(shard.to(HOST), old, new, what=what).to(shard.device)

    def trim(self) -> None:
        self._on_host.trim()

    def _copy_to_host(self, bucket: Bucket) -> Bucket:
        """A copy of the bucket in memory that the host's transport sends from."""
        staged = self._on_host.buffer(bucket.layout, bucket.data.dtype, HOST, bucket.codec)
        staged.wait_until_writable()
        staged.data.copy_(bucket.data)
        return staged


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
