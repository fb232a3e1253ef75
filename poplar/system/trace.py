"""The trace of a step on one rank: spans of passes, waits and the optimizer.

Times are of `time.perf_counter`, which all processes of a host share on Linux.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["pass", "wait", "optimizer"]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of time on one rank.

    A "wait" inside a "pass" is time without compute. The i-th wait with the same `what` is the same
    collective on all ranks. Until the last rank reaches it, the others are *waiting*; from then on
    the time is *communication*.
    """

    kind: Kind
    what: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.stop - self.start


class Trace:
    """Collects spans inside `record`; otherwise it costs one `if`."""

    def __init__(self) -> None:
        self.spans: list[Span] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """Collect the spans of a `with` block into a new list."""
        before, self.spans = self.spans, []
        try:
            yield self.spans
        finally:
            self.spans = before

    @contextmanager
    def span(self, kind: Kind, what: str) -> Iterator[None]:
        """Record a `with` block as one span."""
        if self.spans is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, what, start)

    def add(self, kind: Kind, what: str, start: float) -> None:
        """Record a span from `start` until now."""
        if self.spans is not None:
            self.spans.append(Span(kind, what, start, time.perf_counter()))
