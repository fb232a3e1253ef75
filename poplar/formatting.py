"""How bytes, seconds and ranks are written in messages and tables: each in one place."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_RUNS = 6
"""Runs of consecutive ranks that are written out; beyond, only their number and the range."""


def format_bytes(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds as a person reads them."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: `rank 3`, `ranks 0-2, 5`, `1000 ranks from 0 to 1998`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if len(runs) > _MAX_RUNS:
        return f"{len(ranks)} ranks from {runs[0][0]} to {runs[-1][-1]}"
    written = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {written}"
