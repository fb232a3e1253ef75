"""What `gpu_unequal.py` shows of its rows, and its targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rows import Column, Row, Target

OF_IDEAL = 0.97
"""At least: the ideal time over that of the planned step."""
PREDICTION = 0.03
"""The predicted time differs from the measured one by at most this fraction."""


def _over_planned(row: Row, milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / row["planned_ms"]


def _over_peer(peer: str) -> Callable[[Row], float | None]:
    return lambda row: _over_planned(row, (row.get("peers_ms") or {}).get(peer))


def _percent(row: Row) -> str:
    return "/".join(f"{part:g}" for part in row["mps_percent"])


def prediction_error(row: Row) -> float:
    """Predicted over measured time, less 1."""
    return row["predicted_ms"] / row["planned_ms"] - 1.0


COLUMNS = (
    Column("ranks", "ranks"),
    Column("percent", _percent),
    Column("backend", "backend"),
    Column("stage", "stage_chosen"),
    Column("samples", lambda row: "/".join(map(str, row["samples"]))),
    Column("even ms", "even_ms", "{:.1f}"),
    Column("planned", "planned_ms", "{:.1f}"),
    Column("over even", lambda row: _over_planned(row, row["even_ms"]), "{:.2f}"),
    Column("predicted", "predicted_ms", "{:.1f}"),
    Column("error", prediction_error, "{:+.1%}"),
    Column("ideal", "ideal_ms", "{:.1f}"),
    Column("of ideal", lambda row: _over_planned(row, row.get("ideal_ms")), "{:.2f}"),
    Column("over ddp", _over_peer("ddp"), "{:.2f}"),
    Column("over fsdp2", _over_peer("fsdp2"), "{:.2f}"),
    Column("tuned in s", "tune_seconds", "{:.0f}"),
)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """All targets that apply to the rows."""
    for row in rows:
        case = f"{row['ranks']} ranks, {row['backend']}"
        of_ideal = _over_planned(row, row.get("ideal_ms"))
        if of_ideal is not None:
            yield Target(case=case, what="planned is of ideal", value=of_ideal, wanted=OF_IDEAL)
        error = abs(prediction_error(row))
        what = "predicted differs by"
        yield Target(case=case, what=what, value=error, wanted=PREDICTION, at_most=True)
