"""Host memory for copies from and to devices: pinned, and reused when a copy has been made.

Pinned memory is slow to allocate (it is locked page by page), and only copies from and to it run
beside the host.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from poplar.comm.host_memory.segment import caches_memory

HOST = torch.device("cpu")
_Size = tuple[torch.dtype, int]


def record(device: torch.device) -> torch.cuda.Event | None:
    """The end of what has been issued on the current stream; None where the host computes."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class HostBuffers:
    """Host buffers for the tensors of one device."""

    def __init__(self) -> None:
        self._idle: dict[_Size, deque[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._used: set[_Size] = set()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D uninitialized host tensor to copy from or to `device`.

        It waits until the buffer that was returned first is no longer read.
        """
        self._used.add((dtype, numel))
        idle = self._idle.get((dtype, numel))
        if not idle:
            pinned = device.type == "cuda"
            with torch.inference_mode(False):  # a step may reuse what an evaluation has taken
                return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=pinned)
        buffer, read = idle.popleft()
        if read is not None:
            read.synchronize()
        return buffer

    def put_back(self, buffer: Tensor, read: torch.cuda.Event | None = None) -> None:
        """Return a buffer. `read`: after this event the device no longer reads it."""
        self._idle.setdefault((buffer.dtype, buffer.numel()), deque()).append((buffer, read))

    def idle_bytes(self) -> int:
        """Bytes of the buffers that are not in use."""
        return sum(buffer.nbytes for idle in self._idle.values() for buffer, _ in idle)

    def trim(self) -> None:
        """Free buffers that are not in use, unless memory is cached. Often called in a step."""
        if not caches_memory():
            self._idle.clear()

    def release_unused(self) -> None:
        """Free the sizes that were not used since the last call."""
        self._idle = {size: idle for size, idle in self._idle.items() if size in self._used}
        self._used = set()
