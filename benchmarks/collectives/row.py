"""A row of `--output`: the result of one provider for one case. The dataclass is the schema."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import provenance

from collectives.case import Case
from collectives.provider import Provider


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Seconds are of one collective on the slowest rank; quantiles are over rounds."""

    benchmark: str
    """`allreduce`: other benchmarks may write to the same file."""
    operation: str
    """`all_reduce`, `reduce_scatter` or `all_gather`."""
    provider: str
    """The name in tables."""
    transport: str
    zero_copy: bool
    """Inputs and results are in memory that all ranks can read; otherwise in ordinary tensors."""
    ranks: int
    bytes: int
    """Of the whole buffer."""
    dtype: str
    shares: list[float]
    p20_seconds: float
    p50_seconds: float
    p80_seconds: float
    ratio_to_gloo: float | None
    """Speed-up over gloo's own collective, by the medians."""
    ratio_to_floor: float
    """Median over rounds: seconds relative to copying the minimum bytes in the same round."""
    link_gigabits: float | None
    """Gbit/s between two hosts with half of the ranks each; None: all ranks are on one host."""
    ratio_to_link: float | None
    """Median seconds relative to the time the link needs for the minimum bytes."""
    rounds: int
    copy_bandwidth: float
    """Bytes read and written per second when all ranks copy at once; median of the same rounds."""
    device: str
    versions: str
    commit: str
    day: str
    """YYYY-MM-DD."""

    @property
    def case(self) -> Case:
        """The benchmark case."""
        return Case(self.operation, self.bytes, self.dtype, tuple(self.shares))


def rows_of(
    case: Case,
    seconds: Mapping[Provider, Sequence[float]],
    speeds: Sequence[float],
    link_gigabits: float | None = None,
) -> list[Row]:
    """One row per provider. The provider named `gloo` is the reference.

    Args:
        case: the benchmark case.
        seconds: of each round, by provider.
        speeds: bytes copied per second in each round.
        link_gigabits: Gbit/s, if half of the ranks are on another host.
    """
    gloo = next((s for provider, s in seconds.items() if provider.name == "gloo"), None)
    half = case.ranks // 2
    crossing = case.crossing_bytes((range(half), range(half, case.ranks)))
    bound = 8 * crossing / (1e9 * link_gigabits) if link_gigabits else None
    floors = [case.least_bytes / speed for speed in speeds]
    rows = []
    for provider, own in seconds.items():
        p20, p50, p80 = _quantiles(own)
        rows.append(
            Row(
                benchmark="allreduce",
                operation=case.operation,
                provider=provider.name,
                transport=provider.transport,
                zero_copy=provider.zero_copy,
                ranks=case.ranks,
                bytes=case.nbytes,
                dtype=case.dtype,
                shares=list(case.shares),
                p20_seconds=p20,
                p50_seconds=p50,
                p80_seconds=p80,
                ratio_to_gloo=None if gloo is None else statistics.median(gloo) / p50,
                ratio_to_floor=statistics.median(s / f for s, f in zip(own, floors, strict=True)),
                link_gigabits=link_gigabits,
                ratio_to_link=p50 / bound if bound else None,
                rounds=len(own),
                copy_bandwidth=statistics.median(speeds),
                device=provenance.device(),
                versions=provenance.versions("torch", "mpi4py", "deepspeed"),
                commit=provenance.commit(),
                day=date.today().isoformat(),
            )
        )
    return rows


def read_rows(path: Path) -> list[Row]:
    """Read rows that `write_rows` wrote; lines of other benchmarks are skipped."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [Row(**values) for values in found if values.get("benchmark") == "allreduce"]


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    fifths = statistics.quantiles(values, n=5, method="inclusive")  # within the range of the values
    return fifths[0], statistics.median(values), fifths[3]
