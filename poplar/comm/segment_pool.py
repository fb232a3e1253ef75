"""Parts of a segment, used again and again: fresh memory costs more to touch than to copy."""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterator

from poplar.system import host_limits

_LEAST = mmap.PAGESIZE
_CACHE_SETTING = "POPLAR_MEMORY_CACHE"
"""`off` in this variable of the environment: memory that is not in use now goes back to the system
at once, as in allocators without a cache, and has to be faulted in again at the next use."""


def keeps_memory() -> bool:
    """Whether memory that is not in use now is kept for the next use."""
    return os.environ.get(_CACHE_SETTING) != "off"


class Shared:
    """A part in use, and the last collective in which peers read it."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.read_in: int | None = None
        self.is_blank = True
        """Nothing has been written since its memory was given back."""


class Pool:
    """Hands parts out and takes them back, though peers may still read what has come back."""

    def __init__(self, begin: int, end: int, is_over: Callable[[int], bool]) -> None:
        """Parts lie between `begin` and `end`, in bytes.

        `is_over(c)`: every rank has read what it needs of collective `c`.
        """
        self._next, self._end = begin, end
        self._is_over = is_over
        self._parts: list[Shared] = []
        self._idle: dict[int, list[Shared]] = {}

    def take(self, nbytes: int) -> Shared:
        """A part of at least so many bytes that nobody reads any more.

        Never waits: a peer that still reads may itself be waiting for what is to be written. How
        many parts there are is bounded by how many collectives are in flight.

        Raises:
            MemoryError: the segment is used up, or the host's memory is.
        """
        size = _rounded(nbytes)
        idle = self._idle.setdefault(size, [])
        for place, part in enumerate(idle):
            if part.read_in is None or self._is_over(part.read_in):
                part.read_in = None
                part.is_blank = False
                return idle.pop(place)
        if self._next + size > self._end:
            raise MemoryError(
                f"{nbytes} bytes to share do not fit: {self._next} of {self._end} are taken; use "
                "communicator='process_group'"
            )
        free = host_limits.free_memory()
        if free is not None and nbytes > free:
            # What the kernel would do instead is to kill a process, whose log says nothing.
            raise MemoryError(
                f"{nbytes} bytes to share do not fit into the memory of this host, of which {free} "
                "are free: fewer ranks here, a higher stage, smaller shares or a smaller model"
            )
        part = Shared(self._next, size)
        part.is_blank = False
        self._next += size
        self._parts.append(part)
        return part

    def give_back(self, part: Shared) -> None:
        """Nobody here needs it any more."""
        self._idle[part.nbytes].append(part)

    def blank(self) -> Iterator[Shared]:
        """Idle parts that nobody reads any more, each once: the caller gives their memory back."""
        for part in (part for idle in self._idle.values() for part in idle):
            if not part.is_blank and (part.read_in is None or self._is_over(part.read_in)):
                part.is_blank = True
                yield part

    def holder_of(self, offset: int) -> Shared | None:
        """The part in which a byte of the segment lies."""
        after = bisect.bisect_right(self._parts, offset, key=lambda part: part.offset)
        return self._parts[after - 1] if after else None


def _rounded(nbytes: int) -> int:
    """To a power of two, so that buffers of nearly one size serve each other."""
    return 1 << (max(_LEAST, nbytes) - 1).bit_length()
