"""Rows as tables: the same cells for a terminal, for Markdown and for HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from head_to_head.row import Row
from head_to_head.targets import verdicts

HEADINGS = (
    "stage",
    "configuration",
    "samples/s",
    "p20–p80",
    "of sum",
    "in step",
    "TFLOP/s",
    "MFU",
    "over best peer",
    "over uneven",
    "balance",
    "of ideal",
    "transport",
    "engine",
    "predicted",
    "seconds",
    "MiB",
    "loss",
)
SUMMARY_HEADINGS = ("cluster", "stage", "what", "value", "wanted", "")
NOTHING = "–"
IN_BRACKETS = "in brackets: too few steps to be sure"
_WIDER_THAN_ANY = 10_000


def table_of(rows: Sequence[Row]) -> Table:
    """The table of one cluster, by stage; reasons for absent results below it."""
    first = rows[0]
    table = _table(
        f"{first.cluster}: {first.model} {first.size}, {first.parameters:,} parameters, "
        f"{first.global_batch} samples of {first.context} bytes a step; "
        f"sum of speeds {first.sum_of_speeds:.1f} samples/s, before or after the run at most "
        f"{first.largest_sum_of_speeds:.1f}; {ideals_of(rows)}",
        HEADINGS,
    )
    ordered = in_order(rows)
    for row, below in zip(ordered, [*ordered[1:], None], strict=True):
        # The reason is as wide as all other columns together.
        cells = cells_of([replace(row, absent="see below")] if row.absent else [row])
        ends = below is not None and _group(below) != _group(row)
        table.add_row(*map(escape, next(cells)), end_section=ends)
    table.caption = escape("\n".join(reasons_of(ordered))) or None
    return _whole(table)


def ideals_of(rows: Sequence[Row]) -> str:
    """The ideal balance, by stage where stages differ."""
    ideals = {row.stage: f"{row.ideal_over_even:.3f}" for row in in_order(rows)}
    if len({*ideals.values()}) == 1:
        return f"ideal over even {next(iter(ideals.values()))}"
    return "ideal over even " + ", ".join(f"{ideals[s]} at stage {s}" for s in ideals)


def reasons_of(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each absent result."""
    for row in rows:
        if row.absent:
            yield f"{row.configuration} is absent: {' '.join(row.absent.split())}"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sorted by stage; configurations that use a subset of the ranks come last."""
    return sorted(rows, key=_group)


def _group(row: Row) -> tuple[bool, int]:
    return not row.takes_all_ranks, row.stage


def cells_of(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """One line of text cells per row, in the order of `HEADINGS`."""
    for row in in_order(rows):
        if row.absent:
            reason = " ".join(row.absent.split())
            yield (
                str(row.stage),
                row.configuration,
                f"absent: {reason}",
                *[""] * (len(HEADINGS) - 3),
            )
            continue
        memory = f"{max(row.peak_memory) / 2**20:.0f}" if row.peak_memory else NOTHING
        peer = row.over_best_peer_of_stage
        yield (
            str(row.stage),
            row.configuration,
            f"{row.p50_speed:.1f}",
            f"{row.p20_speed:.1f}–{row.p80_speed:.1f}",
            _percent(row.of_sum_of_speeds),
            _percent(row.of_sum_in_step),
            f"{row.tflops:.3f}",
            f"{100 * (row.mfu or 0):.0f} %",
            NOTHING if peer is None else f"{peer[0]:.3f} ({peer[1]:.3f}–{peer[2]:.3f})",
            _number(row.over_uneven),
            _number(row.balance),
            _number(row.balance_of_ideal),
            _number(row.transport),
            _number(row.engine),
            _number(row.predicted_seconds),
            _number(row.p50_seconds),
            memory,
            _number(row.last_loss, digits=4),
        )


def summary_of(rows: Sequence[Row]) -> Table:
    """Every result that has a threshold, with its threshold."""
    table = _table("thresholds", SUMMARY_HEADINGS)
    for cells in summary_cells(rows):
        table.add_row(*cells)
    if any(cells[-1].startswith("(") for cells in summary_cells(rows)):
        table.caption = IN_BRACKETS
    return _whole(table)


def summary_cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """One line of text cells per verdict."""
    for verdict in verdicts(rows):
        yield (
            verdict.cluster,
            "all" if verdict.stage is None else str(verdict.stage),
            verdict.what,
            verdict.shown,
            verdict.condition,
            verdict.mark,
        )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in headings:
        left = heading in ("configuration", "cluster", "what")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _whole(table: Table) -> Table:
    """The table at its full width: a narrow terminal wraps lines but does not cut cells."""
    caption, table.caption = table.caption, None
    table.width = Console(width=_WIDER_THAN_ANY).measure(table).maximum
    table.caption = caption
    return table


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
