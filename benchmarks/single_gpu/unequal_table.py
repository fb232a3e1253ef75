"""Comparisons of `gpu_unequal.py` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from single_gpu.unequal_row import UnequalRow

HEADINGS = (
    *("ranks", "percent", "backend", "stage", "samples", "even ms", "planned", "over even"),
    *("predicted", "ideal", "of ideal", "over ddp", "over fsdp2", "tuned in s"),
)


def table_of(rows: Sequence[UnequalRow]) -> Table:
    """One line per row."""
    table = Table(*HEADINGS, box=SIMPLE_HEAD)
    for row in rows:
        over = (_ratio(row.peers_ms.get(peer), row.planned_ms) for peer in ("ddp", "fsdp2"))
        table.add_row(
            str(row.ranks),
            "" if row.mps_percent is None else "/".join(f"{part:g}" for part in row.mps_percent),
            row.backend,
            str(row.stage_chosen),
            "/".join(map(str, row.samples)),
            f"{row.even_ms:.1f}",
            f"{row.planned_ms:.1f}",
            _ratio(row.even_ms, row.planned_ms),
            f"{row.predicted_ms:.1f} ({100 * row.prediction_error:+.1f} %)",
            "" if row.ideal_ms is None else f"{row.ideal_ms:.1f}",
            _ratio(row.ideal_ms, row.planned_ms),
            *over,
            f"{row.tune_seconds:.0f}",
        )
    return table


def _ratio(above: float | None, below: float) -> str:
    return "" if above is None else f"{above / below:.2f}"
