"""What `gpu_step.py` shows of its rows, and its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rows import Column, Row, Target

from single_gpu.engines import ON_HOST, OURS, PLAIN

OVER_PLAIN = 1.02
"""At most, of plain autocast's time."""
OVER_FSDP2 = 1.15
"""At least, of FSDP2's speed."""
MEMORY = 0.05
"""Reserved memory differs from the plan's by at most this fraction."""
LOSS = 0.02
"""The losses of two ways differ by at most this fraction after the same steps."""
SIZES = ("350M", "1.1B")
MEMORY_OF = ("1.1B", "poplar 3")
"""The size and the way whose memory is predicted, eager."""


def _milliseconds(row: Row) -> str:
    return f"failed: {row['failed']}" if row.get("failed") else f"{row['ms']:.1f}"


def _spread(row: Row) -> tuple[float, float] | None:
    return None if row.get("p20_ms") is None else (row["p20_ms"], row["p80_ms"])


COLUMNS = (
    Column("size", "size"),
    Column("", lambda row: "compiled" if row["compiled"] else "eager"),
    Column("way", "way"),
    Column("ms", _milliseconds),
    Column("p20–p80", _spread, "{:.1f}–{:.1f}"),
    Column("over plain", "over_plain", "{:.2f}"),
    Column("over FSDP2", "over_fsdp2", "{:.2f}"),
    Column("GiB", "GiB", "{:.2f}"),
    Column("reserved", "GiB_reserved", "{:.2f}"),
    Column("predicted", "GiB_predicted", "{:.2f}"),
    Column("loss", "loss", "{:.4f}"),
)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """All targets that apply to the rows."""
    plain = {_turns_of(row): row for row in rows if row["way"] == PLAIN}
    for row in rows:
        if row["way"] not in OURS:
            continue
        case = f"{row['size']}{', compiled' if row['compiled'] else ''}: {row['way']}"
        at_most = partial(Target, case=case, at_most=True)
        if row["size"] in SIZES and row["way"] != ON_HOST:
            yield at_most(what="time over plain", value=row["over_plain"], wanted=OVER_PLAIN)
            speed = row["over_fsdp2"]
            yield Target(case=case, what="speed over FSDP2", value=speed, wanted=OVER_FSDP2)
        reserved, predicted = row.get("GiB_reserved"), row.get("GiB_predicted")
        if reserved and (row["size"], row["way"], row["compiled"]) == (*MEMORY_OF, False):
            off = None if predicted is None else abs(reserved / predicted - 1.0)
            yield at_most(what="reserved off the plan", value=off, wanted=MEMORY)
        other = plain.get(_turns_of(row))
        if row.get("loss") is not None and other is not None and other["loss"] is not None:
            off = abs(row["loss"] / other["loss"] - 1.0)
            yield at_most(what="loss off plain's", value=off, wanted=LOSS)


def _turns_of(row: Row) -> tuple[object, ...]:
    """Equal for rows that were measured in turns."""
    return row["size"], row["compiled"], row["run"], row["commit"], row["day"]
