"""The readable table of a plan, with its prediction if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from poplar.values.formatting import (
    format_bytes,
    format_interval,
    format_passes,
    format_percent,
    format_rate,
    format_seconds,
    format_table,
    format_usage,
)

if TYPE_CHECKING:
    from poplar.values.plan import Plan

_ROWS_BEFORE_COLLAPSING = 32


class Column(NamedTuple):
    """A title and one cell per rank."""

    title: str
    cells: Sequence[str]
    left_aligned: bool = False


def plan_columns(plan: Plan) -> list[Column]:
    """What is planned for each rank, and those predicted columns that the prediction has."""
    ranks, prediction = range(plan.world_size), plan.prediction or {}
    recomputed = [len(plan.recomputed_units(rank)) for rank in ranks]

    def predicted(what: str) -> Sequence[Any]:
        values = prediction.get(what)
        return values if isinstance(values, Sequence) and len(values) == len(ranks) else ()

    limits = predicted("memory_limit_bytes") or [None] * len(ranks)
    found = [
        Column("device", list(map(str, predicted("devices"))), left_aligned=True),
        Column("samples", [str(sum(passes)) for passes in plan.micro_batches]),
        Column("passes", list(map(format_passes, plan.micro_batches)), left_aligned=True),
        Column("share", [f"{100 * share:.1f} %" for share in plan.shares]),
        Column("recomputed", [str(units) for units in recomputed if any(recomputed)]),
        Column("state on host", list(map(format_percent, plan.host_state))),
        Column("compute", list(map(format_seconds, predicted("compute_seconds")))),
        Column("memory", list(map(_format_memory, predicted("memory_bytes"), limits))),
        Column("busy", list(map(format_percent, predicted("busy_fraction")))),
    ]
    return [column for column in found if column.cells]


def summary(prediction: Mapping[str, Any]) -> list[str]:
    """The predicted step and what bounds it; empty if the prediction has no step."""
    if (step := prediction.get("step_seconds")) is None:
        return []
    line = f"predicted {format_seconds(step)} a step"
    if interval := prediction.get("step_interval"):
        line += f" ({format_interval(step, interval)})"
    if rate := prediction.get("samples_per_second"):
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
    right = [number for number, column in enumerate(columns, 1) if not column.left_aligned]
    return format_table(*numbered, right=[0, *right]).splitlines()


def _format_memory(needed: float, limit: float | None) -> str:
    return format_bytes(needed) if limit is None else format_usage(needed, limit)


def _numbered(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= _ROWS_BEFORE_COLLAPSING:
        return [(str(rank), *row) for rank, row in enumerate(rows)]
    collapsed, first = [], 0
    for row, equal in groupby(rows):
        last = first + len(list(equal)) - 1
        collapsed.append((str(first) if first == last else f"{first}-{last}", *row))
        first = last + 1
    return collapsed
