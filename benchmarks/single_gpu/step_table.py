"""Rows and verdicts of `gpu_step.py` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from verdict import CaseVerdict

from single_gpu.step_row import StepRow

HEADINGS = (
    *("case", "", "way", "ms", "p20–p80", "over plain", "over FSDP2"),
    *("GiB", "reserved", "predicted", "loss"),
)


def table_of(rows: Sequence[StepRow]) -> Table:
    """One line per row; a line between cases."""
    table = Table(*HEADINGS, box=SIMPLE_HEAD)
    before = None
    for row in rows:
        if before is not None and row.comparison != before:
            table.add_section()
        first = row.comparison != before
        table.add_row(
            row.case if first else "",
            ("compiled" if row.compiled else "eager") if first else "",
            row.way,
            *_cells(row),
        )
        before = row.comparison
    return table


def _cells(row: StepRow) -> tuple[str, ...]:
    if row.failed:
        return (f"[bold]failed[/]: {escape(row.failed)}",)
    spread = "" if row.p20_ms is None else f"{row.p20_ms:.1f}–{row.p80_ms:.1f}"
    numbers = (row.over_plain, row.over_fsdp2, row.GiB, row.GiB_reserved, row.GiB_predicted)
    return (
        f"{row.ms:.1f}",
        spread,
        *("" if number is None else f"{number:.2f}" for number in numbers),
        "" if row.loss is None else f"{row.loss:.4f}",
    )


def verdicts_table(verdicts: Sequence[CaseVerdict]) -> Table:
    """Targets and measured values."""
    table = Table("case", "what", "value", "wanted", "", title="targets", box=SIMPLE_HEAD)
    for one in verdicts:
        value = "failed" if one.value is None else f"{one.value:.3f}"
        table.add_row(one.case, one.what, value, one.condition, "✓" if one.met else "short")
    return table
