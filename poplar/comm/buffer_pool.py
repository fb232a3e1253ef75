"""The memory that collectives receive into.

On the host it is reused, because touching fresh memory costs more than copying into it: a
reduce-scatter of 64 MiB over gloo on 2 ranks takes 90 ms with fresh memory and 33 ms with reused
memory. On devices it belongs to the stream that issues the collective and waits for it, so torch's
allocator reuses it in the order of that stream, and nothing is recorded on other streams.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Receive buffers; on the CPU it holds at most as many as were in use at the same time."""

    def __init__(self) -> None:
        self._idle: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._used: set[tuple[torch.dtype, int]] = set()

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D uninitialized tensor with the dtype and device of `like`, on the current stream."""
        size = (like.dtype, numel)
        self._used.add(size)
        idle = self._idle.get(size)
        if idle and like.device.type == "cpu":
            return idle.pop()
        return like.new_empty(numel)

    def put_back(self, buffer: Tensor) -> None:
        """Return a buffer, after all work that uses it has been issued on its stream.

        Only CPU buffers are pooled; torch's allocator caches device memory.
        """
        if buffer.device.type == "cpu":
            self._idle.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    def idle_bytes(self) -> int:
        """Bytes of the buffers that are not in use."""
        return sum(buffer.nbytes for idle in self._idle.values() for buffer in idle)

    def trim(self, caches_memory: bool) -> None:
        """Free the sizes that were not used since the last call, or all of them without caching."""
        cached = self._used if caches_memory else set()
        self._idle = {size: idle for size, idle in self._idle.items() if size in cached}
        self._used = set()
