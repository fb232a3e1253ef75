"""Shared buffers that are used again and again: touching fresh memory costs more than copying."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from poplar.comm.segment import Segment


class Shared:
    """A segment in use, and the last collective in which peers read it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.read_in: int | None = None


class Pool:
    """Hands segments out and takes them back; peers may still read what has come back."""

    def __init__(self, is_over: Callable[[int], bool], wait_until_over: Callable[[int], None]):
        """`is_over(c)`: every peer is done with collective `c`; the other waits until it is."""
        self._is_over = is_over
        self._wait_until_over = wait_until_over
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

    def guard(self, shared: Shared) -> None:
        """Before writing: wait until no peer reads it any more."""
        if shared.read_in is not None:
            self._wait_until_over(shared.read_in)
            shared.read_in = None

    def give_back(self, shared: Shared) -> None:
        """Nobody here needs it any more."""
        self._idle[_rounded(shared.segment.nbytes)].append(shared)

    def give_back_after(self, holder: object, shared: Shared) -> None:
        """Take it back when `holder` is gone."""
        weakref.finalize(holder, self.give_back, shared).atexit = False


def _rounded(nbytes: int) -> int:
    """To a power of two, so that buffers of nearly one size serve each other."""
    return 1 << max(12, (nbytes - 1).bit_length())
