"""One line of `--output`: what one way made of one task. The dataclass is the schema."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import provenance
import torch

from operators.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Quantiles are over rounds."""

    benchmark: str
    """`kernels`: other benchmarks may write to the same file."""
    operation: str
    way: str
    tensors: str
    """The list."""
    dtype: str
    """Of the gradients."""
    numel: int
    least_bytes: int
    p20_seconds: float
    p50_seconds: float
    p80_seconds: float
    bytes_per_second: float
    """The least that have to move, over the median."""
    of_copy: float
    """That over the bandwidth of a copy, a median over the rounds."""
    over_usual: float
    """How much faster than the usual way, a median over the rounds."""
    copy_bandwidth: float
    """Bytes read and written per second."""
    rounds: int
    threads: int
    device: str
    versions: str
    commit: str
    day: str


def rows_of(
    task: Task,
    tensors: str,
    dtype: str,
    seconds: Mapping[str, Sequence[float]],
    speeds: Sequence[float],
    threads: int,
) -> list[Row]:
    """From the seconds of every way and the bandwidths of a copy, by round."""
    rows = []
    for way, own in seconds.items():
        p20, p50, p80 = (quantile(own, part) for part in (0.2, 0.5, 0.8))
        usual = seconds[task.usual]
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
                bytes_per_second=task.least_bytes / p50,
                of_copy=statistics.median(
                    task.least_bytes / s / speed for s, speed in zip(own, speeds, strict=True)
                ),
                over_usual=statistics.median(u / s for u, s in zip(usual, own, strict=True)),
                copy_bandwidth=statistics.median(speeds),
                rounds=len(own),
                threads=threads,
                device=provenance.device(torch.get_default_device().type),
                versions=provenance.versions("torch"),
                commit=provenance.commit(),
                day=date.today().isoformat(),
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
