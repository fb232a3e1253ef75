"""A finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from poplar.doctor.facts import RankFacts
from poplar.values.formatting import format_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found, on which ranks, and what to do."""

    kind: str
    """`"problem"` or `"advice"`."""
    ranks: tuple[int, ...]
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.kind}: {format_ranks(self.ranks)}: {self.what}; {self.fix}"


def problem(ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    """A finding that makes training fail or hang."""
    return _finding("problem", ranks, what, fix)


def advice(ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    """A finding about what makes training slower or may surprise."""
    return _finding("advice", ranks, what, fix)


def _finding(kind: str, ranks: Iterable[RankFacts], what: str, fix: str) -> Finding:
    return Finding(kind=kind, ranks=tuple(rank.rank for rank in ranks), what=what, fix=fix)
