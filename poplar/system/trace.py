"""Records what a rank does in a step as spans: passes, waits and the optimizer update.

Times are from `time.perf_counter`, which all processes of a host share on Linux. On a device whose
work is asynchronous they are times of the device, converted to that clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

SpanKind = Literal["pass", "wait", "optimizer"]


@dataclass(frozen=True, slots=True)
class Span:
    """A named time interval on one rank.

    During a "wait" inside a "pass" the rank does not compute. The i-th wait with the same `what` is
    the same collective on all ranks: until the last rank reaches it, the time of the others is
    waiting; after that it is communication.
    """

    kind: SpanKind
    what: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.stop - self.start


class Clock(Protocol):
    """Takes marks now and reads their times later, so that a device need not be synchronized."""

    def start(self) -> None:
        """Called before the first mark of a recording."""

    def mark(self) -> Any:
        """A mark at this point of the program."""

    def seconds(self, mark: Any) -> float:
        """The time of a mark. May synchronize."""


class Trace:
    """Collects spans inside `record`; otherwise it costs one `if` per span."""

    def __init__(self) -> None:
        self.clock: Clock | None = None
        """None: `time.perf_counter`."""
        self._marks: list[tuple[SpanKind, str, Any, Any]] | None = None

    def use_clock(self, clock: Clock) -> None:
        """Take marks by another clock."""
        self.clock = clock

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """A context that collects spans; the list is filled at its end."""
        before, self._marks = self._marks, []
        spans: list[Span] = []
        if self.clock is not None:
            self.clock.start()
        try:
            yield spans
        finally:
            recorded, self._marks = self._marks, before
            seconds = float if self.clock is None else self.clock.seconds
            spans += [Span(kind, what, *map(seconds, marks)) for kind, what, *marks in recorded]

    def now(self) -> Any:
        """A mark for `add`; None while nothing is recorded."""
        return None if self._marks is None else self._mark()

    def _mark(self) -> Any:
        return time.perf_counter() if self.clock is None else self.clock.mark()

    @contextmanager
    def span(self, kind: SpanKind, what: str) -> Iterator[None]:
        """A context that records itself as one span."""
        start = self.now()
        try:
            yield
        finally:
            self.add(kind, what, start)

    def add(self, kind: SpanKind, what: str, start: Any) -> None:
        """Record a span from `start` until now.

        Args:
            start: a mark, or for a wait that blocks the host the value of `time.perf_counter`.
        """
        if self._marks is not None and start is not None:
            stop = time.perf_counter() if isinstance(start, float) else self._mark()
            self._marks.append((kind, what, start, stop))
