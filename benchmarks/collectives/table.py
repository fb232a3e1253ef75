"""Tables of rows for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from verdict import CaseVerdict

from collectives.case import size_of
from collectives.row import Row

HEADINGS = (
    "shares",
    "dtype",
    "size",
    "provider",
    "ms",
    "p20–p80",
    "over gloo",
    "over floor",
    "over link",
)


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """One table per operation, number of ranks and link."""
    tables: dict[tuple[str, int, float | None], list[Row]] = {}
    for row in rows:
        tables.setdefault((row.operation, row.ranks, row.link_gigabits), []).append(row)
    return [_table(own) for own in tables.values()]


def verdicts_table(verdicts: Sequence[CaseVerdict]) -> Table:
    """A table of targets and measured values."""
    table = Table("case", "what", "value", "wanted", "", title="thresholds", box=SIMPLE_HEAD)
    for verdict in verdicts:
        mark = "" if verdict.met else "short"
        table.add_row(verdict.case, verdict.what, f"{verdict.value:.2f}", verdict.condition, mark)
    return table


def milliseconds(seconds: float) -> str:
    """Three significant digits."""
    return f"{1e3 * seconds:.3g}"


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    slowest, fastest = (f(row.copy_bandwidth for row in rows) / 1e9 for f in (min, max))
    title = (
        f"{first.operation}, {first.ranks} ranks; all ranks together copy {slowest:.0f} to "
        f"{fastest:.0f} GB/s, read and written"
    )
    if first.link_gigabits:
        title += f"; two hosts with {first.link_gigabits:g} Gbit/s between them"
    table = Table(*HEADINGS, title=title, title_justify="left", box=SIMPLE_HEAD)
    for row, below in zip(rows, [*rows[1:], None], strict=True):
        case = row.case
        table.add_row(
            "even" if case.is_even else "/".join(f"{100 * share:g}" for share in case.shares),
            row.dtype,
            size_of(row.bytes),
            escape(row.provider),
            milliseconds(row.p50_seconds),
            f"{milliseconds(row.p20_seconds)}–{milliseconds(row.p80_seconds)}",
            "–" if row.ratio_to_gloo is None else f"{row.ratio_to_gloo:.2f}",
            f"{row.ratio_to_floor:.2f}",
            "–" if row.ratio_to_link is None else f"{row.ratio_to_link:.2f}",
            end_section=below is not None and below.case != case,
        )
    return table
