"""Rows of `benchmarks/memory.py` as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from verdict import CaseVerdict

from memory_limits.clusters import MIB
from memory_limits.row import LargestRow, PeakRow, RecomputationRow

RECOMPUTE = ("never", "auto")


def peaks_table(rows: Sequence[PeakRow]) -> Table:
    """Predicted and measured MiB: one line per plan, the ranks beside each other."""
    title = "peak memory of the ranks in MiB: predicted / measured, and the error"
    table = Table("model", "stage", "plan", "batch", title=title, box=SIMPLE_HEAD)
    ranks = max(row.rank for row in rows) + 1
    for rank in range(ranks):
        table.add_column(f"rank {rank}", justify="right", no_wrap=True)
    for first in rows[::ranks]:
        key = (first.model, first.stage, first.plan, first.batch)
        own = [row for row in rows if (row.model, row.stage, row.plan, row.batch) == key]
        table.add_row(
            first.model,
            str(first.stage),
            first.plan,
            str(first.batch),
            *(
                f"{row.predicted_bytes / MIB:.0f} / {row.measured_bytes / MIB:.0f} "
                f"{100 * row.error:+5.1f} %"
                for row in own
            ),
        )
    return table


def largest_table(rows: Sequence[LargestRow]) -> Table:
    """The engines of one cluster."""
    limits = ", ".join(map(str, rows[0].limits_mib))
    title = f"largest model at {rows[0].cluster}: limits of {limits} MiB"
    table = Table("engine", title=title, box=SIMPLE_HEAD)
    for heading in ("blocks", "M parameters", "planned over it", "trials", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("shares")
    table.add_column("peaks, MiB")
    planned = next((row.parameters for row in rows if row.policy_is_planned), 0)
    for row in rows:
        if row.absent:
            table.add_row(row.engine, "absent", *[""] * 5, escape(row.reason))
            continue
        over = f"{planned / row.parameters:.2f}" if planned and row.parameters else ""
        table.add_row(
            row.engine,
            str(row.blocks),
            f"{row.parameters / 1e6:.1f}",
            over,
            str(row.trials),
            f"{row.seconds:.0f}",
            " ".join(f"{100 * share:.0f}" for share in row.shares),
            " ".join(f"{peak:.0f}" for peak in row.peaks_mib),
        )
    return table


def recomputation_table(rows: Sequence[RecomputationRow]) -> Table:
    """Plans without and with recomputation: one line per cluster."""
    title = "recomputation per rank: seconds per step without and with it"
    table = Table("cluster", "limits, MiB", title=title, box=SIMPLE_HEAD)
    for heading in ("without", "with", "speed-up", "predicted", "units recomputed by rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("batches without", "batches with"):
        table.add_column(heading)
    for row in rows:
        seconds = row.step_seconds
        table.add_row(
            row.cluster,
            " ".join(map(str, row.limits_mib)),
            *(f"{seconds[name]:.3f}" if name in seconds else "no plan" for name in RECOMPUTE),
            *(
                "" if one is None else f"{one:.2f}"
                for one in (row.speed_up, row.predicted_speed_up)
            ),
            " ".join(map(str, row.recomputed)),
            *(_batches(row, name) for name in RECOMPUTE),
        )
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _batches(row: RecomputationRow, name: str) -> str:
    if name not in row.stages:
        return ""
    passes = " ".join("+".join(map(str, own)) or "0" for own in row.micro_batches[name])
    return f"{passes} (stage {row.stages[name]})"


def verdicts_table(verdicts: Sequence[CaseVerdict]) -> Table:
    """Targets and measured values."""
    table = Table("case", "what", "value", "wanted", "", title="targets", box=SIMPLE_HEAD)
    for one in verdicts:
        value = "not measured" if one.value is None else f"{one.value:.3f}"
        table.add_row(one.case, one.what, value, one.condition, "✓" if one.met else "short")
    return table
