"""How the doctor writes ranks, sizes and values that differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from poplar.doctor.facts import RankFacts

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def size(count: float) -> str:
    """Bytes as people write them: `7.9 GiB`."""
    for unit in _SIZES:
        if count < 1024 or unit == _SIZES[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def listed(groups: Mapping[str, Sequence[int]]) -> str:
    """Each value with the ranks that have it."""
    return ", ".join(f"{value or 'none'} ({named(members)})" for value, members in groups.items())


def grouped(ranks: Sequence[RankFacts], values: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that have each value, of one value per rank."""
    groups: dict[str, list[int]] = defaultdict(list)
    for facts, value in zip(ranks, values, strict=True):
        groups[value].append(facts.rank)
    return dict(groups)
