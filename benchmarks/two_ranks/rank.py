"""A rank of a task, and the rows that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rows import Row, write_rows

from poplar import ops

RANKS = 2
ROWS, BENCHMARK = "rows.jsonl", "gpu_ranks"


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
        row = Row.of(
            BENCHMARK,
            {
                "task": task,
                "case": case,
                "operators": ops.providers()[self.device.type].name,
                "backend": dist.get_backend_config(),
            },
            {"ok": ok, "message": message, **figures},
            packages=("torch", "triton"),
            device=self.device.type,
        )
        write_rows(self.folder / ROWS, [row])
