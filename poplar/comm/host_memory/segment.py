"""Anonymous shared memory between the processes of one host, and the blocks in it.

A segment is an anonymous memory file (`memfd_create`) that peers open through
`/proc/<pid>/fd/<descriptor>`. It uses no space in `/dev/shm`, whose size is often limited, leaves
nothing behind after a crash and needs no extra permissions. It reserves addresses for its largest
possible size and takes memory only where it is written. So peers map it once, when the rendezvous
is created, and their mapping stays valid after its owner has exited. Blocks are reused: touching
fresh memory costs more than copying into it.
"""

from __future__ import annotations

import bisect
import mmap
import os
import select
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from poplar.system import host_limits

PAGE = mmap.PAGESIZE
CAN_SHARE = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
"""Whether this system (Linux) has the calls that segments need."""
_MIN_BYTES = 1 << 30
_DEFAULT_MEMORY = 1 << 38
"""Bytes of memory to assume if the system does not report any."""
_CHECKED_BYTES = 1 << 20
"""After as many bytes of new blocks, the host is asked again for its free memory."""
_CACHE_SETTING = "POPLAR_MEMORY_CACHE"
"""Environment variable. `off` returns unused memory to the system at once, as an allocator without
a cache does; its next use then has to fault it in again."""


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


def caches_memory() -> bool:
    """Whether unused memory is cached for the next use."""
    return os.environ.get(_CACHE_SETTING) != "off"


class Block:
    """A block of the segment, and the last collective in which peers access it."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.last_collective: int | None = None
        self.is_used = True
        """Whether it was allocated since `release_idle` last looked for unused blocks."""
        self.is_released = True
        """Whether its memory has been returned to the system and not been written since."""


class SegmentPool:
    """Allocates blocks and takes them back, possibly while peers still read them."""

    def __init__(self, begin: int, end: int, is_over: Callable[[int], bool]) -> None:
        """Blocks lie between the byte offsets `begin` and `end`.

        `is_over(c)`: whether every rank has finished reading for collective `c`.
        """
        self._next, self._end = begin, end
        self._is_over = is_over
        self._blocks: list[Block] = []
        self._idle: dict[int, list[Block]] = {}
        self._unchecked = 0
        """Bytes of new blocks since the host was asked for its free memory."""

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes` that no peer reads.

        Never waits, because a peer that still reads may be waiting for the data that will be
        written here. The number of blocks is bounded by the collectives in flight.

        Raises:
            MemoryError: the segment is full, or the host has too little free memory.
        """
        size = _rounded(nbytes)
        idle = self._idle.setdefault(size, [])
        for position in reversed(range(len(idle))):  # the latest, so that few blocks are used
            if self._is_unread(idle[position]):
                block = idle.pop(position)
                block.last_collective = None
                block.is_released, block.is_used = False, True
                return block
        if self._next + size > self._end:
            raise MemoryError(
                f"cannot share {nbytes} bytes: {self._next} of the segment's {self._end} bytes are "
                "in use; use communicator='process_group'"
            )
        self._unchecked += size
        free = None
        if self._unchecked >= _CHECKED_BYTES:  # the host's answer takes about a millisecond
            free, self._unchecked = host_limits.free_memory(), 0
        if free is not None and nbytes > free:
            # Otherwise the kernel would kill a process, without an error message.
            raise MemoryError(
                f"cannot share {nbytes} bytes: this host has only {free} bytes of free memory; use "
                "fewer ranks here, a higher stage, smaller shares or a smaller model"
            )
        block = Block(self._next, size)
        block.is_released = False
        self._next += size
        self._blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        """Take back a block that this rank no longer uses; peers may still read it."""
        self._idle[block.nbytes].append(block)

    def idle_bytes(self) -> int:
        """Bytes of the idle blocks whose memory has not been returned to the system."""
        blocks = (block for idle in self._idle.values() for block in idle)
        return sum(block.nbytes for block in blocks if not block.is_released)

    def release_idle(self, *, unused: bool = False) -> Iterator[Block]:
        """Idle blocks that no peer reads, each once; the caller returns their memory.

        `unused`: only those that were not allocated since the last such call.
        """
        for block in (block for idle in self._idle.values() for block in idle):
            if unused and block.is_used:
                block.is_used = False
            elif not block.is_released and self._is_unread(block):
                block.is_released = True
                yield block

    def _is_unread(self, block: Block) -> bool:
        return block.last_collective is None or self._is_over(block.last_collective)

    def block_at(self, offset: int) -> Block | None:
        """The block that contains this byte offset of the segment."""
        after = bisect.bisect_right(self._blocks, offset, key=lambda block: block.offset)
        return self._blocks[after - 1] if after else None


def _rounded(nbytes: int) -> int:
    """Round up to a power of two, so that buffers of similar size reuse each other's blocks."""
    return 1 << (max(PAGE, nbytes) - 1).bit_length()
