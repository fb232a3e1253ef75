"""What the doctor found: a problem or a piece of advice, about whom, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from poplar.doctor.words import named


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was found, and what to do about it."""

    kind: str
    """`"problem"` or `"advice"`."""
    ranks: tuple[int, ...]
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {named(self.ranks)}: {self.what}; {self.remedy}"
