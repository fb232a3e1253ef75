"""Anonymous shared memory between the processes of one host.

A segment is an anonymous memory file (`memfd_create`) that peers open through
`/proc/<pid>/fd/<descriptor>`. It uses no space in `/dev/shm`, whose size is often limited, leaves
nothing behind after a crash and needs no extra permissions. It reserves addresses for its largest
possible size and takes memory only where it is written. So peers map it once, when the rendezvous
is created, and their mapping stays valid after its owner has exited.
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
"""Whether this system (Linux) has the calls that segments need."""
_MIN_BYTES = 1 << 30
_DEFAULT_MEMORY = 1 << 38
"""Bytes of memory to assume if the system does not report any."""


def segment_bytes(ranks: int) -> int:
    """Bytes of addresses to reserve per rank, with this many ranks on the host.

    A process maps the segments of all ranks, in every group, into 2^47 bytes of addresses. One rank
    rarely shares more than all memory, or four times its part of it.
    """
    memory = host_limits.total_memory() or _DEFAULT_MEMORY
    return -(-max(_MIN_BYTES, min(memory, 4 * memory // ranks)) // PAGE) * PAGE


class Segment:
    """Shared memory created by this process: `nbytes` of addresses, without memory at first."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("poplar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
            self.memory = mmap.mmap(self.descriptor, nbytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self.address = view(self.memory, torch.uint8, 0, 1).data_ptr()

    def release_memory(self, offset: int, nbytes: int) -> None:
        """Return whole pages to the system, for all processes; they read as zeros afterwards."""
        self.memory.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def close_descriptor(self) -> None:
        """Close the file once all peers have opened it; the mappings stay valid."""
        os.close(self.descriptor)
        self.descriptor = -1


class PeerSegment:
    """The segment of another process on this host, and whether that process is alive."""

    def __init__(self, pid: int, descriptor: int, nbytes: int) -> None:
        """Open the peer's segment.

        Raises:
            OSError: the process or the segment does not exist, or access is not permitted.
        """
        handle = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self._process = os.pidfd_open(pid)

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            os.close(self._process)

    def has_exited(self) -> bool:
        """Whether the process has exited, even if its parent has not collected its exit code."""
        watch = select.poll()  # `select.select` refuses descriptors above 1023
        watch.register(self._process, select.POLLIN)
        return bool(watch.poll(0))


def view(memory: mmap.mmap | memoryview, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
    """A tensor over shared memory. It and its views hold a reference to `memory`."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
