"""A row of `--output`: the result of one implementation of a task. The dataclass is the schema."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import provenance

from operators import stack
from operators.measure import Measured
from operators.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Quantiles are over rounds. Fields with a default are missing in the oldest rows."""

    benchmark: str
    """`kernels`: other benchmarks may write to the same file."""
    operation: str
    way: str
    tensors: str
    """The name of the model."""
    dtype: str
    """Of the gradients, and of the parameters in the forward pass."""
    numel: int
    least_bytes: int
    p20_seconds: float
    """Like the next two: host seconds until the device has finished."""
    p50_seconds: float
    p80_seconds: float
    bytes_per_second: float
    """The minimum bytes over the median seconds, of the device if available."""
    of_copy: float
    """Bandwidth relative to a copy's, median over the rounds."""
    over_usual: float
    """Speed-up over the usual implementation by host seconds, median over the rounds."""
    copy_bandwidth: float
    """Bytes read and written per second."""
    rounds: int
    threads: int
    device: str
    versions: str
    commit: str
    day: str
    device_p50_seconds: float | None = None
    """Device seconds, without launches; None on the CPU."""
    operators: str = ""
    """The provider of Poplar's operators in this run, from `poplar.ops.providers`."""

    @property
    def provider(self) -> str:
        """`operators` without the detail: `C++`, `Triton` or `plain PyTorch`."""
        return self.operators.partition(" (")[0]


def rows_of(task: Task, tensors: str, dtype: str, measured: Measured, threads: int) -> list[Row]:
    """One row per implementation."""
    rows = []
    usual = measured.seconds[task.usual]
    for way, own in measured.seconds.items():
        p20, p50, p80 = (quantile(own, part) for part in (0.2, 0.5, 0.8))
        on_device = measured.device_seconds.get(way)
        moving = own if on_device is None else on_device
        rows.append(
            Row(
                benchmark="kernels",
                operation=task.name,
                way=way,
                tensors=tensors,
                dtype=dtype,
                numel=task.numel,
                least_bytes=task.least_bytes,
                p20_seconds=p20,
                p50_seconds=p50,
                p80_seconds=p80,
                bytes_per_second=task.least_bytes / quantile(moving, 0.5),
                of_copy=statistics.median(
                    task.least_bytes / s / speed
                    for s, speed in zip(moving, measured.speeds, strict=True)
                ),
                over_usual=statistics.median(u / s for u, s in zip(usual, own, strict=True)),
                copy_bandwidth=statistics.median(measured.speeds),
                rounds=len(own),
                threads=threads,
                device=provenance.device(task.device),
                versions=stack.versions(task.device),
                commit=provenance.commit(),
                day=date.today().isoformat(),
                device_p50_seconds=None if on_device is None else quantile(on_device, 0.5),
                operators=stack.operators(task.device),
            )
        )
    return rows


def quantile(values: Sequence[float], part: float) -> float:
    """One of the values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))]


def read_rows(path: Path) -> list[Row]:
    """Read the rows that `write_rows` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    contents = [json.loads(line) for line in lines if line.strip()]
    return [Row(**content) for content in contents if content["benchmark"] == "kernels"]
