"""Rows as tables for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from operators.row import Row
from operators.targets import Verdict
from operators.tasks import OURS
from poplar.report import theme


def table_of(rows: Sequence[Row]) -> Table:
    """One line for each way."""
    headings = ("operation", "tensors", "dtype", "way", "ms", "GB/s", "of copy", "over usual")
    table = Table(box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    before: tuple[str, ...] = ()
    for row in rows:
        case = (row.operation, row.tensors, row.dtype)
        if before and case != before:
            table.add_section()
        shown, before = (("", "", "") if case == before else case), case
        table.add_row(
            *shown,
            row.way,
            f"{1e3 * row.p50_seconds:.3g}",
            f"{row.bytes_per_second / 1e9:.3g}",
            f"{100 * row.of_copy:.0f} %",
            f"{row.over_usual:.2f}",
        )
    return table


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """What was wanted, and what came."""
    table = Table("case", "what", "value", "wanted", "", title="thresholds", box=SIMPLE_HEAD)
    for verdict in verdicts:
        mark = "" if verdict.met else "short"
        table.add_row(
            verdict.case, verdict.what, f"{verdict.value:.3g}", f">= {verdict.wanted:g}", mark
        )
    return table


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars: percent of a copy's bandwidth, by case and way. Writes a PNG file."""
    cases = list(dict.fromkeys((row.operation, row.tensors, row.dtype) for row in rows))
    with theme.style():
        figure = theme.new_figure(height=1.0 + 0.35 * len(rows))
        axes = figure.subplots()
        place, ticks, names = 0.0, [], []
        for case in cases:
            for row in (r for r in rows if (r.operation, r.tensors, r.dtype) == case):
                colour = theme.SERIES[0] if row.way == OURS else theme.MUTED
                axes.barh(place, 100 * row.of_copy, color=colour)
                ticks.append(place)
                names.append(f"{', '.join(case)}: {row.way}")
                place += 1
            place += 0.6
        axes.set_yticks(ticks, names)
        axes.invert_yaxis()
        axes.axvline(100, color=theme.MUTED, linewidth=1)
        axes.set_xlabel("percent of a copy's bandwidth, counting what has to move")
        figure.savefig(path, bbox_inches="tight")
