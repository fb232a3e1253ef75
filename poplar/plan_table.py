"""The readable table of a plan, with its prediction if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from poplar.formatting import (
    format_bytes,
    format_passes,
    format_percent,
    format_rate,
    format_seconds,
    format_usage,
)

_ROWS_BEFORE_COLLAPSING = 32


class Column(NamedTuple):
    """A title and one cell per rank."""

    title: str
    cells: tuple[str, ...]
    left_aligned: bool = False


def planned(micro_batches: Sequence[Sequence[int]], shares: Sequence[float]) -> list[Column]:
    """Samples, passes and share of each rank."""
    return [
        Column("samples", tuple(str(sum(passes)) for passes in micro_batches)),
        Column("passes", tuple(map(format_passes, micro_batches)), left_aligned=True),
        Column("share", tuple(f"{100 * share:.1f} %" for share in shares)),
    ]


def devices(prediction: Mapping[str, Any], ranks: int) -> list[Column]:
    """The device names of a prediction, if it has them."""
    names = _by_rank(prediction, "devices", ranks)
    return [Column("device", tuple(map(str, names)), left_aligned=True)] if names else []


def predicted(prediction: Mapping[str, Any], ranks: int) -> list[Column]:
    """The columns of a prediction, without those that it does not have."""
    columns: list[Column] = []
    for title, what, show in (
        ("compute", "compute_seconds", format_seconds),
        ("memory", "memory_bytes", _format_memory),
        ("busy", "busy_fraction", format_percent),
    ):
        values = _by_rank(prediction, what, ranks)
        if what == "memory_bytes" and values:
            limits = _by_rank(prediction, "memory_limit_bytes", ranks) or [None] * ranks
            values = list(zip(values, limits, strict=True))
        if values:
            columns.append(Column(title, tuple(map(show, values))))
    return columns


def summary(prediction: Mapping[str, Any]) -> list[str]:
    """The predicted step and what bounds it; empty if the prediction has no step."""
    step = prediction.get("step_seconds")
    if not isinstance(step, (int, float)):
        return []
    line = f"predicted {format_seconds(step)} a step"
    if isinstance(rate := prediction.get("samples_per_second"), (int, float)):
        line += f", {format_rate(rate)}"
    if bound := prediction.get("bound"):
        line += f"; bound by {bound}"
    if gap := prediction.get("optimality_gap"):
        line += f"; at most {100 * gap:.2g} % from the fastest plan"
    return [line]


def lines(columns: Sequence[Column]) -> list[str]:
    """The lines of a table, one per rank; with many ranks, equal neighbours share a line."""
    rows = list(zip(*(column.cells for column in columns), strict=True))
    numbered = [("rank", *(column.title for column in columns)), *_numbered(rows)]
    widths = [max(map(len, cells)) for cells in zip(*numbered, strict=True)]
    left_aligned = [False, *(column.left_aligned for column in columns)]
    return [
        "  ".join(
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(row, widths, left_aligned, strict=True)
        )
        for row in numbered
    ]


def _format_memory(needed_and_limit: tuple[float, float | None]) -> str:
    needed, limit = needed_and_limit
    return format_bytes(needed) if limit is None else format_usage(needed, limit)


def _by_rank(prediction: Mapping[str, Any], what: str, ranks: int) -> list[Any]:
    """One value per rank; empty if the prediction has none, or for another number of ranks."""
    values = prediction.get(what)
    if not isinstance(values, (list, tuple)) or len(values) != ranks:
        return []
    return list(values)


def _numbered(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= _ROWS_BEFORE_COLLAPSING:
        return [(str(rank), *row) for rank, row in enumerate(rows)]
    collapsed, first = [], 0
    for row, equal in groupby(rows):
        last = first + len(list(equal)) - 1
        collapsed.append((str(first) if first == last else f"{first}-{last}", *row))
        first = last + 1
    return collapsed
