"""Allocation of blocks in a shared segment. Blocks are reused: touching fresh memory costs more
than copying into it.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterator

from poplar.system import host_limits

_MIN_BYTES = mmap.PAGESIZE
_CACHE_SETTING = "POPLAR_MEMORY_CACHE"
"""Environment variable. `off` returns unused memory to the system at once, as an allocator without
a cache does; its next use then has to fault it in again."""


def caches_memory() -> bool:
    """Whether unused memory is cached for the next use."""
    return os.environ.get(_CACHE_SETTING) != "off"


class Block:
    """A block of the segment, and the last collective in which peers access it."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.last_collective: int | None = None
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

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes` that no peer reads.

        Never waits, because a peer that still reads may be waiting for the data that will be
        written here. The number of blocks is bounded by the collectives in flight.

        Raises:
            MemoryError: the segment is full, or the host has too little free memory.
        """
        size = _rounded(nbytes)
        idle = self._idle.setdefault(size, [])
        for position, block in enumerate(idle):
            if block.last_collective is None or self._is_over(block.last_collective):
                block.last_collective = None
                block.is_released = False
                return idle.pop(position)
        if self._next + size > self._end:
            raise MemoryError(
                f"cannot share {nbytes} bytes: {self._next} of the segment's {self._end} bytes are "
                "in use; use communicator='process_group'"
            )
        free = host_limits.free_memory()
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

    def release_idle(self) -> Iterator[Block]:
        """Idle blocks that no peer reads, each once; the caller returns their memory."""
        for block in (block for idle in self._idle.values() for block in idle):
            if not block.is_released and (
                block.last_collective is None or self._is_over(block.last_collective)
            ):
                block.is_released = True
                yield block

    def block_at(self, offset: int) -> Block | None:
        """The block that contains this byte offset of the segment."""
        after = bisect.bisect_right(self._blocks, offset, key=lambda block: block.offset)
        return self._blocks[after - 1] if after else None


def _rounded(nbytes: int) -> int:
    """Round up to a power of two, so that buffers of similar size reuse each other's blocks."""
    return 1 << (max(_MIN_BYTES, nbytes) - 1).bit_length()
