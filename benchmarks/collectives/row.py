"""Rows of `allreduce.py`: one provider in one case. Seconds are of the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rows import Column, Row

from collectives.case import Case, size_of
from collectives.provider import Provider


def case_of(row: Row) -> Case:
    """The collective that was run."""
    return Case(row["operation"], row["bytes"], row["dtype"], tuple(row["shares"]))


def _shares(row: Row) -> str:
    case = case_of(row)
    return "even" if case.is_even else "/".join(f"{100 * share:g}" for share in case.shares)


COLUMNS = (
    Column("operation", "operation"),
    Column("ranks", "ranks"),
    Column("shares", _shares),
    Column("dtype", "dtype"),
    Column("size", lambda row: size_of(row["bytes"])),
    Column("provider", "provider"),
    Column("ms", lambda row: 1e3 * row["p50_seconds"], "{:.3g}"),
    Column(
        "p20–p80",
        lambda row: (1e3 * row["p20_seconds"], 1e3 * row["p80_seconds"]),
        "{:.3g}–{:.3g}",
    ),
    Column("over gloo", "ratio_to_gloo", "{:.2f}"),
    Column("over floor", "ratio_to_floor", "{:.2f}"),
    Column("Gbit/s", "link_gigabits", "{:g}"),
    Column("over link", "ratio_to_link", "{:.2f}"),
)


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
        link_gigabits: Gbit/s between two hosts with half of the ranks each; None: one host.
    """
    gloo = next((s for provider, s in seconds.items() if provider.name == "gloo"), None)
    half = case.ranks // 2
    crossing = case.crossing_bytes((range(half), range(half, case.ranks)))
    bound = 8 * crossing / (1e9 * link_gigabits) if link_gigabits else None
    floors = [case.least_bytes / speed for speed in speeds]
    rows = []
    for provider, own in seconds.items():
        p20, p50, p80 = _quantiles(own)
        what = {
            "operation": case.operation,
            "provider": provider.name,
            "transport": provider.transport,
            "zero_copy": provider.zero_copy,
            "ranks": case.ranks,
            "bytes": case.nbytes,
            "dtype": case.dtype,
            "shares": list(case.shares),
            "link_gigabits": link_gigabits,
        }
        figures = {
            "p20_seconds": p20,
            "p50_seconds": p50,
            "p80_seconds": p80,
            # Speed-up over gloo's own collective, by the medians.
            "ratio_to_gloo": None if gloo is None else statistics.median(gloo) / p50,
            # Seconds relative to copying the minimum bytes in the same round.
            "ratio_to_floor": statistics.median(s / f for s, f in zip(own, floors, strict=True)),
            # Relative to the time that the link needs for the minimum bytes.
            "ratio_to_link": p50 / bound if bound else None,
            "rounds": len(own),
            # Bytes read and written per second when all ranks copy at once.
            "copy_bandwidth": statistics.median(speeds),
        }
        rows.append(Row.of("allreduce", what, figures, packages=("torch", "mpi4py", "deepspeed")))
    return rows


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    fifths = statistics.quantiles(values, n=5, method="inclusive")  # within the range of the values
    return fifths[0], statistics.median(values), fifths[3]
