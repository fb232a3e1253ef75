"""The transport for devices that the process group does not support: staging through host memory.

Examples: several ranks on one GPU (which NCCL refuses), GPUs with a gloo group, devices of several
vendors. Data is copied to pinned host memory, sent by the host's transport (shared memory on one
host), and copied back. Slower than a device-to-device link, and always available.

The host does not wait for copies when a collective is issued. The host's transport starts a
collective once its data is there: in a later call, or in a wait for it or for a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from poplar import ops
from poplar.comm.bucket import Bucket, Codec, Reduction
from poplar.comm.communicator import (
    CachedBytes,
    CallbackWork,
    Communicator,
    Splits,
    Work,
    own_slice,
)
from poplar.comm.host_buffers import HostBuffers, record
from poplar.comm.shard_layout import Layout


class StagedCommunicator(Communicator):
    """Uneven collectives of tensors on any device, in the reduction order of the host transport."""

    name = "staged"

    def __init__(self, on_host: Communicator) -> None:
        """`on_host`: the transport for the copies on the host."""
        super().__init__(on_host.group)
        self._on_host = on_host
        self._buffers = HostBuffers()
        self._not_started: deque[_StagedWork] = deque()
        self.hosts = on_host.hosts

    def codecs(self, codec: Codec) -> tuple[Codec, Codec | None]:
        return self._on_host.codecs(codec)

    def reduce(self, reduction: Reduction) -> Work:
        bucket, out = reduction.bucket, reduction.out
        staged = self._copy_to_host(bucket)
        total = self._buffers.take(out.numel(), out.dtype, out.device)

        def start() -> Work:
            on_host = Reduction(staged, total, accumulate=False, what=reduction.what)
            return self._on_host.reduce(on_host)

        def copy_back() -> None:
            if reduction.accumulate:
                part = total.to(out.device, non_blocking=True)
                ops.rank_sum_(out, [part], accumulate=True, sums=reduction.squares)
            else:
                out.copy_(total, non_blocking=True)
                if reduction.squares is not None:
                    reduction.squares.copy_(ops.block_sums_of_squares(out))
            self._buffers.put_back(total, record(out.device))
            self._buffers.put_back(staged.data)

        return self._issue(out.device, start, copy_back)

    def all_gather(
        self, data: Tensor, layout: Layout, *, what: str, own: Tensor | None = None
    ) -> Work:
        own = own_slice(data, layout, self.group.rank) if own is None else own
        staged = self._buffers.take(layout.numel, data.dtype, data.device)
        own_slice(staged, layout, self.group.rank).copy_(own, non_blocking=True)
        return self._issue(
            data.device,
            lambda: self._on_host.all_gather(staged, layout, what=what),
            lambda: self._copy_back(data, staged),
        )

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: Splits, *, what: str) -> Work:
        on_host = self._buffers.take(sent.numel(), sent.dtype, sent.device)
        on_host.copy_(sent, non_blocking=True)
        staged = self._buffers.take(received.numel(), received.dtype, received.device)

        def copy_back() -> None:
            self._copy_back(received, staged)
            self._buffers.put_back(on_host)

        return self._issue(
            sent.device,
            lambda: self._on_host.all_to_all(staged, on_host, sizes, what=what),
            copy_back,
        )

    def cached_bytes(self) -> CachedBytes:
        own = CachedBytes(private=self._buffers.idle_bytes())
        return own.plus(self._on_host.cached_bytes())

    def trim(self) -> None:
        self._buffers.trim()
        self._on_host.trim()

    def end_step(self) -> None:
        self._buffers.release_unused()
        self._on_host.end_step()

    def _copy_to_host(self, bucket: Bucket) -> Bucket:
        """A copy of the bucket in host memory, complete once the device has made it."""
        data = self._buffers.take(bucket.data.numel(), bucket.data.dtype, bucket.data.device)
        data.copy_(bucket.data, non_blocking=True)
        return replace(bucket, data=data)

    def _copy_back(self, data: Tensor, staged: Tensor) -> None:
        data.copy_(staged, non_blocking=True)
        self._buffers.put_back(staged, record(data.device))

    # The host's transport starts collectives in the order in which they were issued.

    def _issue(
        self, device: torch.device, start: Callable[[], Work], finish: Callable[[], None]
    ) -> Work:
        work = _StagedWork(record(device), start, self._start_until)
        self._not_started.append(work)
        while self._not_started and self._not_started[0].is_copied:
            self._not_started.popleft().start()
        return CallbackWork(work, finish)

    def _start_until(self, work: _StagedWork) -> None:
        """Start this collective and all earlier ones; waits for their copies."""
        while not work.is_started:
            self._not_started.popleft().start()


class _StagedWork:
    """A collective that the host's transport starts when its data is on the host."""

    def __init__(
        self,
        copied: torch.cuda.Event | None,
        start: Callable[[], Work],
        start_until: Callable[[_StagedWork], None],
    ) -> None:
        """`copied`: the data is on the host after this event; None: it is there already."""
        self._copied, self._start, self._start_until = copied, start, start_until
        self._work: Work | None = None
        self._error: Exception | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the data is on the host."""
        return self._copied is None or self._copied.query()

    @property
    def is_started(self) -> bool:
        """Whether the host's transport has started it, or has failed to."""
        return self._work is not None or self._error is not None

    def start(self) -> None:
        """Start it once its data is there. An error is raised in every wait for it."""
        if self._copied is not None:
            self._copied.synchronize()
        try:
            self._work = self._start()
        except Exception as error:
            self._error = error
            raise

    def wait(self) -> float:
        """As `Work.wait`."""
        self._start_until(self)
        if self._work is None:
            assert self._error is not None
            raise self._error
        return self._work.wait()
