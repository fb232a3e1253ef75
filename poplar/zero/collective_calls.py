"""Calls of methods that all ranks call: what one rank raises in one reaches all ranks.

A rank that leaves such a call alone leaves the others waiting, or lets them update their part of
the parameters without it. So an error either is raised on all ranks (`agreed`, see `agreement`),
and training may continue, or it stops all ranks. There is nothing in between, whatever raised it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from poplar.comm import Group
from poplar.zero.agreement import take_agreed


class CollectiveCalls:
    """The collective calls of one optimizer, of which this rank runs one at a time."""

    def __init__(
        self, group: Group, stop: Callable[[str, BaseException], None], drop: Callable[[], None]
    ) -> None:
        """
        Args:
            group: the ranks.
            stop: stops all ranks, because of the call with this name and of its error.
            drop: drops what the call has left on this rank.
        """
        self._group, self._stop, self._drop = group, stop, drop
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A context for one call, or for a part of one that is running in this thread.

        Raises:
            RuntimeError: another thread runs one.
            CollectiveTimeout: an earlier call has stopped all ranks.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"rank {self._group.rank}: {name} while another thread runs a method of this "
                "optimizer; call the methods of an optimizer in one thread at a time"
            )
        self._depth += 1
        try:
            if self._depth == 1:
                self._group.check()
            yield
        except BaseException as error:
            if self._depth == 1:
                self._end(name, error)
            raise
        finally:
            self._depth -= 1
            self._lock.release()

    def _end(self, name: str, error: BaseException) -> None:
        if not take_agreed(error):
            self._stop(name, error)
            self._drop()
