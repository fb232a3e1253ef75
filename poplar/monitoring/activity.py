"""What each rank was doing in a traced step: compute, optimizer, communication or waiting.

Spans of one rank may overlap (a wait inside a pass), so each moment gets exactly one activity by
precedence: wait, optimizer, pass. The i-th wait with the same name is one collective on all ranks:
it is waiting until the last rank has begun it, and communication from then on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from poplar.system.trace import Span

COMPUTE, COMMUNICATION, WAITING, OPTIMIZER = "compute", "communication", "waiting", "optimizer"
ACTIVITIES = (COMPUTE, OPTIMIZER, COMMUNICATION, WAITING)
"""In the order of the legend."""

_PRECEDENCE = (WAITING, COMMUNICATION, OPTIMIZER, COMPUTE)


@dataclass(frozen=True, slots=True)
class Stretch:
    """One activity without interruption, in seconds since the first span began."""

    activity: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.stop - self.start


def stretches(spans: Sequence[Sequence[Span]]) -> list[list[Stretch]]:
    """The activities of each rank, in order and without overlaps; gaps are loading or Python.

    Args:
        spans: of one step, by rank, on one clock.

    Returns:
        One list per rank; time 0 is the earliest start of any span.
    """
    begin = min((span.start for rank in spans for span in rank), default=0.0)
    last_arrivals: dict[tuple[str, int], float] = {}
    for rank in spans:
        for name, span in _numbered_waits(rank):
            last_arrivals[name] = max(span.start, last_arrivals.get(name, span.start))
    return [_without_overlaps(_activities(rank, last_arrivals, begin)) for rank in spans]


def seconds_by_activity(rank: Sequence[Stretch]) -> dict[str, float]:
    """Total seconds of each activity, all of `ACTIVITIES`."""
    totals = dict.fromkeys(ACTIVITIES, 0.0)
    for stretch in rank:
        totals[stretch.activity] += stretch.seconds
    return totals


def _numbered_waits(rank: Sequence[Span]) -> Iterator[tuple[tuple[str, int], Span]]:
    seen: dict[str, int] = defaultdict(int)
    for span in sorted(rank, key=lambda span: span.start):
        if span.kind == "wait":
            yield (span.what, seen[span.what]), span
            seen[span.what] += 1


def _activities(
    rank: Sequence[Span], last_arrivals: dict[tuple[str, int], float], begin: float
) -> Iterator[Stretch]:
    for span in rank:
        if span.kind != "wait":
            activity = COMPUTE if span.kind == "pass" else OPTIMIZER
            yield Stretch(activity, span.start - begin, span.stop - begin)
    for name, span in _numbered_waits(rank):
        together = min(last_arrivals[name], span.stop) - begin
        yield Stretch(WAITING, span.start - begin, together)
        yield Stretch(COMMUNICATION, together, span.stop - begin)


def _without_overlaps(parts: Iterable[Stretch]) -> list[Stretch]:
    """Each moment once, by precedence; adjacent stretches of one activity are joined."""
    changes: dict[float, list[tuple[str, int]]] = defaultdict(list)
    for part in parts:
        if part.stop > part.start:
            changes[part.start].append((part.activity, 1))
            changes[part.stop].append((part.activity, -1))
    active = dict.fromkeys(_PRECEDENCE, 0)
    result: list[Stretch] = []
    times = sorted(changes)
    for start, stop in pairwise(times):
        for activity, change in changes[start]:
            active[activity] += change
        current = next((name for name in _PRECEDENCE if active[name]), None)
        if current is None:
            continue
        if result and result[-1].activity == current and result[-1].stop == start:
            result[-1] = Stretch(current, result[-1].start, stop)
        else:
            result.append(Stretch(current, start, stop))
    return result
