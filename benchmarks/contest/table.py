"""Rows as tables: the same cells for a terminal, for Markdown and for HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from contest.row import Row
from contest.targets import verdicts

HEADINGS = (
    "stage",
    "entrant",
    "samples/s",
    "p20–p80",
    "of sum",
    "TFLOP/s",
    "MFU",
    "over best peer",
    "balance",
    "of ideal",
    "transport",
    "engine",
    "predicted",
    "seconds",
    "MiB",
    "loss",
)


def table_of(rows: Sequence[Row]) -> Table:
    """One cluster, by stage; whoever is absent says why."""
    first = rows[0]
    table = _table(
        f"{first.cluster}: {first.model} {first.size}, {first.parameters:,} parameters, "
        f"{first.global_batch} samples of {first.context} bytes a step; "
        f"sum of speeds {first.sum_of_speeds:.1f} samples/s",
        HEADINGS,
    )
    for cells in cells_of(rows):
        table.add_row(*cells)
    return table


def cells_of(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line of text cells per row, as `HEADINGS` name them."""
    for row in sorted(rows, key=lambda row: (not row.takes_all_ranks, row.stage)):
        if row.absent:
            yield (str(row.stage), row.entrant, f"absent: {row.absent}", *[""] * 13)
            continue
        memory = f"{max(row.peak_memory) / 2**20:.0f}" if row.peak_memory else "–"
        peer = row.over_best_peer_of_stage
        ours = row.balance is not None
        yield (
            str(row.stage),
            row.entrant,
            f"{row.p50_speed:.1f}",
            f"{row.p20_speed:.1f}–{row.p80_speed:.1f}",
            f"{100 * (row.of_sum_of_speeds or 0):.1f} %",
            f"{row.tflops:.3f}",
            f"{100 * (row.mfu or 0):.0f} %",
            "–" if peer is None else f"{peer[0]:.3f} ({peer[1]:.3f}–{peer[2]:.3f})",
            _number(row.balance),
            _number(row.balance_of_ideal),
            _number(row.transport if ours else None),
            _number(row.engine if ours else None),
            _number(row.predicted_seconds),
            _number(row.p50_seconds),
            memory,
            f"{row.last_loss:.4f}",
        )


def summary_of(rows: Sequence[Row]) -> Table:
    """Every figure that has a threshold, beside it."""
    table = _table("what it has to show", ("cluster", "stage", "what", "value", "wanted", ""))
    for cells in summary_cells(rows):
        table.add_row(*cells)
    return table


def summary_cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """A line of text cells per verdict."""
    for verdict in verdicts(rows):
        yield (
            verdict.cluster,
            "all" if verdict.stage is None else str(verdict.stage),
            verdict.what,
            f"{verdict.value:.2g}" if verdict.at_most else f"{verdict.value:.3f}",
            f"{'<=' if verdict.at_most else '>='} {verdict.wanted:g}",
            "✓" if verdict.met else "short",
        )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        left = heading in ("entrant", "cluster", "what")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
