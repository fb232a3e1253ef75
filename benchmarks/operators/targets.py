"""What the kernels have to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from operators.row import Row
from operators.tasks import OURS

HEADLINE = "gpt-124m"


@dataclass(frozen=True)
class Verdict:
    """A figure and what is wanted of it."""

    case: str
    what: str
    value: float
    wanted: float

    @property
    def met(self) -> bool:
        """At least as much as is wanted."""
        return self.value >= self.wanted


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Of the rows that there are."""
    for row in rows:
        if row.tensors != HEADLINE or row.way != OURS:
            continue
        case = f"{row.operation}, {row.tensors}, {row.dtype}"
        usual, best_wanted = (2.0, 1.2) if row.device.startswith("cuda") else (1.3, 1.0)
        if row.operation == "pack":
            yield Verdict(case, "of the copy's bandwidth", row.of_copy, 0.9)
        if row.operation == "chain":
            yield Verdict(case, "of its bandwidth bound", row.of_copy, 0.9)
            yield Verdict(case, "over the usual torch", row.over_usual, usual)
            best = _best(rows, row)
            if best is not None:
                over = row.over_usual / best.over_usual
                yield Verdict(case, "over the best torch", over, best_wanted)


def _best(rows: Sequence[Row], ours: Row) -> Row | None:
    same = [
        row
        for row in rows
        if row.way == "best torch"
        and (row.operation, row.tensors, row.dtype, row.device)
        == (ours.operation, ours.tensors, ours.dtype, ours.device)
    ]
    return same[-1] if same else None
