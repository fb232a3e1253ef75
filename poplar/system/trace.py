"""What a rank did in a step, span by span: passes, waits and the optimizer.

Only times and names, so that every room can write into it and a report can be drawn from it. The
clock is `time.perf_counter`, which all processes of a host share on Linux.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["pass", "wait", "optimizer"]


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time on one rank.

    A "wait" inside a "pass" is time without compute. The i-th wait for the same `what` is the same
    collective on all ranks: until the last of them waits for it too, the others are *waiting*; from
    then on it is *communication*.
    """

    kind: SpanKind
    what: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


class Trace:
    """Collects spans while it is asked to; costs an `if` otherwise."""

    def __init__(self) -> None:
        self.spans: list[Span] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """Collect into a new list for the time of a `with` block."""
        before, self.spans = self.spans, []
        try:
            yield self.spans
        finally:
            self.spans = before

    @contextmanager
    def span(self, kind: SpanKind, what: str) -> Iterator[None]:
        """One span around a `with` block."""
        if self.spans is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, what, start)

    def add(self, kind: SpanKind, what: str, start: float) -> None:
        """A span from `start` until now."""
        if self.spans is not None:
            self.spans.append(Span(kind, what, start, time.perf_counter()))
