"""Rows of `gpu_unequal.py`, which the two classes define, and their targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

OF_IDEAL = 0.97
"""At least: the ideal time over that of the planned step."""
PREDICTION = 0.03
"""The predicted time differs from the measured one by at most this fraction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnequalRow:
    """Even and planned steps on unequal ranks. Old rows end with `tune_seconds`."""

    ranks: int
    mps_percent: list[float] | None
    """Of the GPU's multiprocessors, by rank; on the CPU of the cores. None: not limited."""
    backend: str
    model: str
    global_batch: int
    stage_chosen: int
    samples: list[int]
    """Of the plan, by rank."""
    even_ms: float
    """Milliseconds of a step under the even plan of the same stage, the median over turns."""
    planned_ms: float
    predicted_ms: float
    """By the plan."""
    tune_seconds: float
    """Time that `tune` has taken."""
    ideal_ms: float | None = None
    """At the sum of the ranks' speeds in plain passes."""
    speeds: list[float] = field(default_factory=list)
    """Samples per second of plain passes by rank, while all of them run."""
    peers_ms: dict[str, float] = field(default_factory=dict)
    """DDP and FSDP2 with even batches on the same ranks."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why a peer has no result."""
    peak_GiB: list[float] = field(default_factory=list)  # noqa: N815
    """Reserved by the allocator in all turns, by rank; empty on the CPU."""
    rounds: int = 1
    benchmark: str = "gpu_unequal"
    device: str = ""
    versions: str = ""
    commit: str = ""
    day: str = ""

    @property
    def of_ideal(self) -> float | None:
        """Ideal over planned time."""
        return None if self.ideal_ms is None else self.ideal_ms / self.planned_ms

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time, less 1."""
        return self.predicted_ms / self.planned_ms - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartsRow:
    """How many of several starts of the ranks hung or failed. Also one comparison that did."""

    what: str = "starts"
    """Or `comparison`."""
    ranks: int
    mps_percent: list[float] | None
    backend: str
    starts: int
    hung: int
    failed: int
    seconds: float
    """Of a start, the median."""
    benchmark: str = "gpu_unequal starts"
    device: str = ""
    versions: str = ""
    commit: str = ""
    day: str = ""


def load_rows(path: Path) -> list[UnequalRow | StartsRow]:
    """Read the rows of both kinds."""
    rows: list[UnequalRow | StartsRow] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        kind = StartsRow if "starts" in values else UnequalRow
        known = {one.name for one in fields(kind)}
        rows.append(kind(**{name: values[name] for name in known & values.keys()}))
    return rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """A result and its target."""

    text: str
    met: bool


def verdicts(rows: Sequence[UnequalRow | StartsRow]) -> Iterator[Verdict]:
    """All targets that apply to the rows; plans only where ranks were made unequal."""
    for row in rows:
        where = f"{row.ranks} ranks, {row.backend}"
        if isinstance(row, StartsRow):
            text = f"{where}: {row.hung} hung and {row.failed} failed of {row.starts} {row.what}"
            yield Verdict(text, not row.hung and not row.failed)
            continue
        if row.mps_percent is None:
            continue
        if row.of_ideal is not None:
            text = f"{where}: planned is {row.of_ideal:.3f} of ideal (>= {OF_IDEAL})"
            yield Verdict(text, row.of_ideal >= OF_IDEAL)
        error = row.prediction_error
        text = f"{where}: predicted is {100 * error:+.1f} % off (within {100 * PREDICTION:.0f} %)"
        yield Verdict(text, abs(error) <= PREDICTION)
