"""Shared buffers that are used again and again: touching fresh memory costs more than copying."""

from __future__ import annotations

from collections.abc import Callable

from poplar.comm.segment import Segment


class Shared:
    """A segment in use, and the last collective in which peers read it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.read_in: int | None = None


class Pool:
    """Hands segments out and takes them back, though peers may still read what has come back."""

    def __init__(self, is_over: Callable[[int], bool]) -> None:
        """`is_over(c)`: every peer has read what it needs of collective `c`."""
        self._is_over = is_over
        self._idle: dict[int, list[Shared]] = {}

    def take(self, nbytes: int) -> Shared:
        """A segment of at least so many bytes that nobody reads any more.

        Never waits: a peer that still reads may itself be waiting for what is to be written. How
        many segments there are is bounded by how many collectives are in flight.
        """
        size = _rounded(nbytes)
        idle = self._idle.setdefault(size, [])
        for place, shared in enumerate(idle):
            if shared.read_in is None or self._is_over(shared.read_in):
                return idle.pop(place)
        return Shared(Segment(size))

    def give_back(self, shared: Shared) -> None:
        """Nobody here needs it any more."""
        self._idle[shared.segment.nbytes].append(shared)


def _rounded(nbytes: int) -> int:
    """To a power of two, so that buffers of nearly one size serve each other."""
    return 1 << max(12, (nbytes - 1).bit_length())
