"""One finding of the doctor: a problem or advice, the ranks, and the fix."""

from __future__ import annotations

from dataclasses import dataclass

from poplar.formatting import format_ranks


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
