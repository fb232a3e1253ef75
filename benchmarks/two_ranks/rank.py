"""A rank of a task, and the rows that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import NamedTuple

import provenance
import torch
import torch.distributed as dist
from rows import write_rows

RANKS = 2
ROWS = "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one case."""

    task: str
    case: str
    ok: bool
    figures: Mapping[str, float] = field(default_factory=dict)
    """Seconds, counts or relative errors, by name."""
    message: str = ""
    benchmark: str = "gpu_ranks"
    backend: str
    device: str
    versions: str
    commit: str
    day: str


class Rank(NamedTuple):
    """What the tasks need of this rank."""

    device: torch.device
    rank: int
    folder: Path
    """Shared by the ranks of one start."""
    ends: float
    """When the task should be over, by `time.monotonic`."""
    tries: int | None
    """Limit of the places at which a task fails; None: no limit but the time."""

    def note(self, task: str, case: str, ok: bool, message: str = "", **figures: float) -> None:
        """Write a row. Call it on one rank."""
        row = Row(
            task=task,
            case=case,
            ok=ok,
            figures=figures,
            message=message,
            backend=dist.get_backend_config(),
            device=provenance.device(self.device.type),
            versions=provenance.versions("torch", "triton"),
            commit=provenance.commit(),
            day=date.today().isoformat(),
        )
        write_rows(self.folder / ROWS, [row])
