"""What tables of `train.py` show of a row; `benchmarks/README.md` explains the columns."""

from __future__ import annotations

from rows import Column, Row

from head_to_head.row import over_uneven


def _speed(row: Row) -> str:
    if row["absent"]:
        return f"absent: {' '.join(row['absent'].split())}"
    return f"{row['p50_speed']:.1f}"


def _percentiles(row: Row) -> tuple[float, float] | None:
    return None if row["absent"] else (row["p20_speed"], row["p80_speed"])


def _over_best_peer(row: Row) -> tuple[float, ...] | None:
    interval = row["over_best_peer_of_stage"]
    return None if interval is None else tuple(interval)


def _mebibytes(row: Row) -> float | None:
    return max(row["peak_memory"]) / 2**20 if row["peak_memory"] else None


COLUMNS = (
    Column("stage", "stage"),
    Column("configuration", "configuration"),
    Column("samples/s", _speed),
    Column("p20–p80", _percentiles, "{:.1f}–{:.1f}"),
    Column("of sum", "of_sum_of_speeds", "{:.1%}"),
    Column("in step", "of_sum_in_step", "{:.1%}"),
    Column("TFLOP/s", "tflops", "{:.3f}"),
    Column("MFU", "mfu", "{:.0%}"),
    Column("over best peer", _over_best_peer, "{:.3f} ({:.3f}–{:.3f})"),
    Column("over uneven", over_uneven, "{:.3f}"),
    Column("balance", "balance", "{:.3f}"),
    Column("of ideal", "balance_of_ideal", "{:.3f}"),
    Column("transport", "transport", "{:.3f}"),
    Column("engine", "engine", "{:.3f}"),
    Column("predicted", "predicted_seconds", "{:.3f}"),
    Column("seconds", "p50_seconds", "{:.3f}"),
    Column("MiB", _mebibytes, "{:.0f}"),
    Column("loss", "last_loss", "{:.4f}"),
)


def title_of(row: Row) -> str:
    """What the rows of one comparison have in common."""
    return (
        f"{row['cluster']}: {row['model']} {row['size']}, {row['parameters']:,} parameters, "
        f"{row['global_batch']} samples of {row['context']} bytes a step; sum of speeds "
        f"{row['sum_of_speeds']:.1f} samples/s, before or after the run at most "
        f"{row['largest_sum_of_speeds']:.1f}"
    )
