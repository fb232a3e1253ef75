"""The simulated step that `simulate` returns, as spans per rank; prints a table, writes a trace.

Times are seconds since the step began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from poplar import plan_table
from poplar.formatting import format_seconds

Stream = Literal["compute", "communication"]

STREAMS: tuple[Stream, ...] = ("compute", "communication")
"""Streams of a rank; each runs one span at a time."""


class Span(NamedTuple):
    """One operation on one stream of one rank."""

    stream: Stream
    what: str
    """`forward`, `backward`, `optimizer`, or a collective (`step_actions.Issue`); `synchronization`
    and `agreement` are measured seconds beyond collectives."""
    unit: int | None
    """None: the whole model. Before stage 3, small neighbouring units count as one."""
    pass_index: int | None
    """The rank's pass; None: once per step."""
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration; of compute, with the time for which communication stopped it."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step of every rank."""

    stage: int
    devices: tuple[str, ...]
    """Names, by rank."""
    step_seconds: float
    """Until the last rank ends."""
    spans: tuple[tuple[Span, ...], ...]
    """By rank, ordered by end."""
    busy_seconds: tuple[float, ...]
    """By rank: passes and optimizer, without the time for which communication stopped them."""
    waiting_seconds: tuple[float, ...]
    """By rank: both streams are idle, waiting for other ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def busy_fraction(self) -> tuple[float, ...]:
        """By rank: `busy_seconds` over the step."""
        step = self.step_seconds
        return tuple(busy / step if step else 1.0 for busy in self.busy_seconds)

    @property
    def communication_seconds(self) -> tuple[float, ...]:
        """By rank: exposed communication."""
        return tuple(
            max(0.0, self.step_seconds - busy - waiting)
            for busy, waiting in zip(self.busy_seconds, self.waiting_seconds, strict=True)
        )

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace for ui.perfetto.dev: a process per rank, a thread per stream."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            separator = ""
            for event in self._events():
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        for rank, device in enumerate(self.devices):
            yield _name(rank, f"rank {rank} ({device}), simulated", "process_name")
            yield _name(rank, rank, "process_sort_index", key="sort_index")
            for thread, stream in enumerate(STREAMS):
                yield _name(rank, stream, "thread_name", tid=thread)
        for rank, spans in enumerate(self.spans):
            for span in spans:
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": STREAMS.index(span.stream),
                    "name": span.what if span.unit is None else f"{span.what} {span.unit}",
                    "cat": span.what,
                    "ts": 1e6 * span.begin,
                    "dur": 1e6 * span.seconds,
                    "args": {
                        key: value
                        for key, value in (("unit", span.unit), ("pass", span.pass_index))
                        if value is not None
                    },
                }

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        step = format_seconds(self.step_seconds)
        columns = [
            plan_table.Column("device", self.devices, left_aligned=True),
            plan_table.Column("compute", tuple(map(format_seconds, self.busy_seconds))),
            plan_table.Column(
                "communication", tuple(map(format_seconds, self.communication_seconds))
            ),
            plan_table.Column("waiting", tuple(map(format_seconds, self.waiting_seconds))),
            plan_table.Column("busy", tuple(f"{100 * busy:.0f} %" for busy in self.busy_fraction)),
        ]
        header = f"stage {self.stage}, {self.world_size} {ranks}: simulated {step} a step"
        return "\n".join([header, *plan_table.lines(columns)])


def _name(rank: int, name: str | int, what: str, key: str = "name", tid: int = 0) -> dict[str, Any]:
    """A metadata event for a process or a thread."""
    return {"ph": "M", "pid": rank, "tid": tid, "name": what, "args": {key: name}}
