"""Records what a rank does in a step as spans: passes, waits and the optimizer update.

Times are from `time.perf_counter`, which all processes of a host share on Linux.
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


class Trace:
    """Collects spans inside `record`; otherwise it costs one `if` per span."""

    def __init__(self) -> None:
        self.spans: list[Span] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """A context that collects spans into a new list."""
        before, self.spans = self.spans, []
        try:
            yield self.spans
        finally:
            self.spans = before

    @contextmanager
    def span(self, kind: SpanKind, what: str) -> Iterator[None]:
        """A context that records itself as one span."""
        if self.spans is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, what, start)

    def add(self, kind: SpanKind, what: str, start: float) -> None:
        """Record a span from `start` until now."""
        if self.spans is not None:
            self.spans.append(Span(kind, what, start, time.perf_counter()))
