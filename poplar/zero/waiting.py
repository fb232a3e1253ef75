"""How long this rank has waited for collectives in each step, without synchronizing the host.

A wait that blocks the host is timed by the host's clock. A wait that blocks a stream is the time
between two events around it, which is known when the device has passed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from poplar.comm import Work
from poplar.system.trace import Trace
from poplar.zero.streams import Streams


class StepWaiting:
    """The waits of one step."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._stalls: list[tuple[Any, Any]] = []

    def add(self, seconds: float) -> None:
        """Add a wait of the host."""
        self._seconds += seconds

    def add_stall(self, before: Any, after: Any) -> None:
        """Add a wait of a stream, between two events."""
        self._stalls.append((before, after))

    @property
    def has_stalls(self) -> bool:
        """Whether a stream has waited."""
        return bool(self._stalls)

    @property
    def is_known(self) -> bool:
        """Whether the device has passed all waits."""
        return not self._stalls or bool(self._stalls[-1][1].query())

    def seconds(self) -> float:
        """Seconds waited. Synchronizes with the device unless `is_known`."""
        if self._stalls:
            self._stalls[-1][1].synchronize()
            milliseconds = sum(before.elapsed_time(after) for before, after in self._stalls)
            self._seconds, self._stalls = self._seconds + milliseconds / 1e3, []
        return self._seconds


class WaitingTime:
    """The waits of the current step, and what is known of earlier ones."""

    def __init__(self, streams: Streams, trace: Trace) -> None:
        self._streams, self._trace = streams, trace
        self.step = StepWaiting()
        self._unread: deque[StepWaiting] = deque()
        self._latest = float("nan")

    def begin_step(self) -> None:
        """Start to count the waits of the next step. It may be called several times before it."""
        if self.step.has_stalls:
            self._unread.append(self.step)
        self.step = StepWaiting()

    def wait_for(self, work: Work, what: str) -> None:
        """Wait for a collective before the compute stream continues."""
        if self._streams.asynchronous:
            with self.stall(what):
                work.wait()
        else:
            self.step.add(work.wait())

    @contextmanager
    def stall(self, what: str) -> Iterator[None]:
        """A context that makes the compute stream of a device wait for `what`."""
        before = self._streams.timestamp()
        with self._trace.span("wait", what):
            yield
        self.step.add_stall(before, self._streams.timestamp())

    def latest(self) -> float:
        """Seconds waited in the latest step that is known without a synchronization.

        That is the current step if waits block the host. On a device it is an earlier one; NaN if
        the device has finished none.
        """
        if not self._streams.asynchronous:
            self._unread.clear()
            return self.step.seconds()
        while self._unread and self._unread[0].is_known:
            self._latest = self._unread.popleft().seconds()
        return self._latest
