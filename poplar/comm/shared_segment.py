"""Memory that the processes of one host share, without a name that could outlive them.

A segment is an anonymous file in memory (`memfd_create`), which peers open through
`/proc/<pid>/fd/<number>`: nothing lies in `/dev/shm`, whose size is often limited, nothing is left
behind by a crash, and it needs no rights beyond those to one's own processes. It is as large as it
may ever have to be, and takes memory only where it was written. So peers open it once, when ranks
meet, and what they have opened stays, even if its maker has ended.
"""

from __future__ import annotations

import mmap
import os
import select

import torch
from torch import Tensor

from poplar.system import host_limits

PAGE = mmap.PAGESIZE
CAN_SHARE = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
"""Linux has both."""
_LEAST, _USUAL = 1 << 30, 1 << 38
"""Bytes of addresses; of memory, where the system does not say how much there is."""


def addresses(ranks: int) -> int:
    """Bytes of addresses for what one of so many ranks of this host may share.

    Each process maps everybody's, in every group, and has 2^47 in all; so they are few where ranks
    are many. What one rank shares is hardly ever more than all memory or four times its part of it.
    """
    memory = host_limits.total_memory() or _USUAL
    return -(-max(_LEAST, min(memory, 4 * memory // ranks)) // PAGE) * PAGE


class Segment:
    """Shared memory that this process has made: addresses for `nbytes`, no memory yet."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = os.memfd_create("poplar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.number, nbytes)
            self.memory = mmap.mmap(self.number, nbytes)
        except OSError:
            os.close(self.number)
            raise
        self.address = view(self.memory, torch.uint8, 0, 1).data_ptr()

    def give_back(self, offset: int, nbytes: int) -> None:
        """Memory of whole pages to the system, for all processes; what is read there next is 0."""
        self.memory.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def shut(self) -> None:
        """Everybody who shall have it has opened it."""
        os.close(self.number)
        self.number = -1


class Peer:
    """Another process of this host: its segment, and whether it is still there."""

    def __init__(self, pid: int, number: int, nbytes: int) -> None:
        """Open its segment.

        Raises:
            OSError: no such process or segment, or not permitted.
        """
        handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self._process = os.pidfd_open(pid)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)

    def has_ended(self) -> bool:
        """Whether the process is over, even if nobody has asked for its exit code."""
        watch = select.poll()  # `select` refuses numbers above 1023
        watch.register(self._process, select.POLLIN)
        return bool(watch.poll(0))


def view(memory: mmap.mmap | memoryview, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
    """Elements of shared memory as a tensor, which keeps `memory` alive, as its own views do."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
