"""Memory that the processes of one host share, without a name that could outlive them.

A segment is an anonymous file in memory (`memfd_create`), which peers open through
`/proc/<pid>/fd/<number>`: nothing lies in `/dev/shm`, whose size is often limited, and nothing is
left behind by a crash. It needs no rights beyond those to one's own processes.
"""

from __future__ import annotations

import mmap
import os
import select

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
CAN_SHARE = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
"""Linux has both."""


class Segment:
    """Shared memory that this process has made; kept until nobody holds it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        self.number = os.memfd_create("poplar", os.MFD_CLOEXEC)
        os.ftruncate(self.number, self.nbytes)
        self.memory = mmap.mmap(self.number, self.nbytes)
        self.address = view(self.memory, torch.uint8, 0, 1).data_ptr()

    def __del__(self) -> None:
        os.close(self.number)

    def holds(self, data: Tensor) -> bool:
        """Whether `data` lies in here."""
        return self.address <= data.data_ptr() < self.address + self.nbytes


def open_segment(pid: int, number: int, nbytes: int) -> mmap.mmap:
    """Map a segment of another process of this host.

    Raises:
        OSError: no such process or segment, or not permitted.
    """
    handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)


def view(memory: mmap.mmap, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
    """Elements of shared memory as a tensor, which keeps it mapped."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


class Peer:
    """Another process of this host: whether it is still there, and what it shares."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self._maps: dict[int, mmap.mmap] = {}

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def has_ended(self) -> bool:
        """Whether the process is over, even if nobody has asked for its exit code."""
        return bool(select.select([self._handle], [], [], 0)[0])

    def memory(self, number: int, nbytes: int) -> mmap.mmap:
        """A segment of it. Segments live as long as the transport, so numbers don't come again."""
        if number not in self._maps:
            self._maps[number] = open_segment(self.pid, number, nbytes)
        return self._maps[number]
