"""Rows as a table for a terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from verdict import CaseVerdict

from operators.row import Row
from operators.tasks import OURS


def table_of(rows: Sequence[Row]) -> Table:
    """One line per row."""
    on_device = any(row.device_p50_seconds is not None for row in rows)
    times = ("ms", "device ms") if on_device else ("ms",)
    table = Table(box=SIMPLE_HEAD)
    for heading in (
        "operation",
        "tensors",
        "dtype",
        "way",
        *times,
        "GB/s",
        "of copy",
        "over usual",
    ):
        table.add_column(heading, overflow="fold")
    before: tuple[str, ...] = ()
    for row in rows:
        case = (row.operation, row.tensors, row.dtype)
        if before and case != before:
            table.add_section()
        shown, before = (("", "", "") if case == before else case), case
        table.add_row(
            *shown,
            _label(row),
            *(_milliseconds(s) for s in (row.p50_seconds, row.device_p50_seconds)[: len(times)]),
            f"{row.bytes_per_second / 1e9:.3g}",
            f"{100 * row.of_copy:.0f} %",
            f"{row.over_usual:.2f}",
        )
    return table


def _label(row: Row) -> str:
    """The implementation; for Poplar's, with its provider if the row has one."""
    return f"{row.way}, {row.provider}" if row.way == OURS and row.provider else row.way


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def verdicts_table(verdicts: Sequence[CaseVerdict]) -> Table:
    """A table of targets and measured values."""
    table = Table("case", "what", "value", "wanted", "", title="thresholds", box=SIMPLE_HEAD)
    for verdict in verdicts:
        mark = "" if verdict.met else "short"
        table.add_row(verdict.case, verdict.what, f"{verdict.value:.3g}", verdict.condition, mark)
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars: percent of a copy's bandwidth, by case and implementation. Writes a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from poplar.report import theme  # needs matplotlib, unlike the rest of this module

    cases = list(dict.fromkeys((row.operation, row.tensors, row.dtype) for row in rows))
    with theme.style():
        figure = theme.new_figure(height=1.0 + 0.35 * len(rows))
        axes = figure.subplots()
        place, ticks, names = 0.0, [], []
        for case in cases:
            for row in (r for r in rows if (r.operation, r.tensors, r.dtype) == case):
                color = theme.SERIES[0] if row.way == OURS else theme.MUTED
                axes.barh(place, 100 * row.of_copy, color=color)
                ticks.append(place)
                names.append(f"{', '.join(case)}: {_label(row)}")
                place += 1
            place += 0.6
        axes.set_yticks(ticks, names)
        axes.invert_yaxis()
        axes.axvline(100, color=theme.MUTED, linewidth=1)
        axes.set_xlabel("percent of a copy's bandwidth, by minimum bytes")
        figure.savefig(path, bbox_inches="tight")
