"""Rows of `gpu_step.py`: one way to train one model on one rank. The class is the schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from single_gpu.engines import PEER, PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Rows from before 2026-11-24 have only the first five fields and `run`."""

    case: str
    compiled: bool
    """Each block by `torch.compile`."""
    way: str
    ms: float | None
    """Milliseconds a step, the median; None: it has failed."""
    GiB: float | None
    """Peak of allocated memory; None on the CPU."""
    run: int = 1
    """Rows of the same run were measured in turns."""
    p20_ms: float | None = None
    p80_ms: float | None = None
    GiB_reserved: float | None = None
    """Peak of what the allocator holds."""
    GiB_predicted: float | None = None
    """What the plan says, without what is held outside of the allocator."""
    over_plain: float | None = None
    """Time over that of plain autocast, the median over rounds."""
    over_fsdp2: float | None = None
    """Speed over that of FSDP2."""
    loss: float | None = None
    """After the last step."""
    steps: int = 12
    """Measured steps, over all rounds."""
    rounds: int = 1
    failed: str = ""
    """Why there is no result."""
    benchmark: str = "gpu_step"
    parameters: int | None = None
    batch: int | None = None
    passes: int = 1
    context: int | None = None
    device: str = ""
    versions: str = ""
    commit: str = ""
    day: str = ""

    @property
    def comparison(self) -> tuple[str, bool, int, str]:
        """Equal for rows that were measured in turns."""
        return self.case, self.compiled, self.run, self.commit + self.day


def load_rows(path: Path) -> list[StepRow]:
    """Read rows; ratios that old rows lack are computed from the medians."""
    known = {field.name for field in fields(StepRow)}
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        rows.append(StepRow(**{name: values[name] for name in known & values.keys()}))
    return list(_with_ratios(rows))


def _with_ratios(rows: Iterable[StepRow]) -> Iterator[StepRow]:
    rows = list(rows)
    medians = {(*row.comparison, row.way): row.ms for row in rows if row.ms}
    for row in rows:
        plain, fsdp2 = (medians.get((*row.comparison, way)) for way in (PLAIN, PEER))
        if row.ms and row.over_plain is None and plain:
            row = replace(row, over_plain=row.ms / plain)
        if row.ms and row.over_fsdp2 is None and fsdp2:
            row = replace(row, over_fsdp2=fsdp2 / row.ms)
        yield row
