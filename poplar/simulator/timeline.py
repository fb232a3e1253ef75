"""The simulated step that `simulate` returns, as spans per rank; prints a table, writes a trace.

Times are seconds since the step began.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from poplar.values import plan_table
from poplar.values.formatting import format_percent, format_seconds
from poplar.values.regular_files import naming
from poplar.values.schema import json_text

STREAMS = ("compute", "communication")
"""Streams of a rank; each runs one span at a time."""


class Span(NamedTuple):
    """One operation on one stream of one rank."""

    stream: str
    """One of `STREAMS`."""
    what: str
    """`forward`, `backward`, `optimizer`, or a collective (`step.actions.Issue`); `synchronization`
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
        events = map(json_text, self._events())
        with naming(path), Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + next(events))
            file.writelines(f",\n{event}" for event in events)
            file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        for rank, (device, spans) in enumerate(zip(self.devices, self.spans, strict=True)):
            title = {"name": f"rank {rank} ({device}), simulated"}
            yield {"ph": "M", "pid": rank, "name": "process_name", "args": title}
            place = {"sort_index": rank}
            yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": place}
            for tid, stream in enumerate(STREAMS):
                name = {"name": stream}
                yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": name}
            for span in spans:
                indices = {"unit": span.unit, "pass": span.pass_index}
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": STREAMS.index(span.stream),
                    "name": span.what if span.unit is None else f"{span.what} {span.unit}",
                    "cat": span.what,
                    "ts": 1e6 * span.begin,
                    "dur": 1e6 * span.seconds,
                    "args": {name: index for name, index in indices.items() if index is not None},
                }

    def __str__(self) -> str:
        ranks = "rank" if self.world_size == 1 else "ranks"
        step = format_seconds(self.step_seconds)
        header = f"stage {self.stage}, {self.world_size} {ranks}: simulated {step} a step"
        columns = [plan_table.Column("device", self.devices, left_aligned=True)]
        for title, values, show in (
            ("compute", self.busy_seconds, format_seconds),
            ("communication", self.communication_seconds, format_seconds),
            ("waiting", self.waiting_seconds, format_seconds),
            ("busy", self.busy_fraction, format_percent),
        ):
            columns.append(plan_table.Column(title, tuple(map(show, values))))
        return "\n".join([header, *plan_table.lines(columns)])
