"""One line of `--output`: what one way made of one task. The dataclass is the schema."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import provenance

from operators import stack
from operators.measure import Measured
from operators.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Quantiles are over rounds; a field with a default is not in the oldest rows."""

    benchmark: str
    """`kernels`: other benchmarks may write to the same file."""
    operation: str
    way: str
    tensors: str
    """The list."""
    dtype: str
    """Of the gradients, and of the parameters that a forward pass reads."""
    numel: int
    least_bytes: int
    p20_seconds: float
    """As are the next two, the host's until the device is done: what a trainer waits for."""
    p50_seconds: float
    p80_seconds: float
    bytes_per_second: float
    """The least that have to move, over the median: the device's where it has one."""
    of_copy: float
    """That over the bandwidth of a copy, a median over the rounds."""
    over_usual: float
    """How much faster than the usual way by the host's seconds, a median over the rounds."""
    copy_bandwidth: float
    """Bytes read and written per second."""
    rounds: int
    threads: int
    device: str
    versions: str
    commit: str
    day: str
    device_p50_seconds: float | None = None
    """The device's own, without launches; None on the CPU."""
    operators: str = ""
    """Who served Poplar's in this run, as `poplar.ops.describe` says it."""

    @property
    def served(self) -> str:
        """`operators` without the reason: `C++`, `Triton` or `plain PyTorch`."""
        return self.operators.partition(" (")[0]


def rows_of(task: Task, tensors: str, dtype: str, measured: Measured, threads: int) -> list[Row]:
    """Of every way."""
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


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Behind what the file holds."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    contents = [json.loads(line) for line in lines if line.strip()]
    return [Row(**content) for content in contents if content["benchmark"] == "kernels"]
