"""A measured value beside its target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was measured and its target; subclasses say where."""

    what: str
    value: float | None
    """None: it should have been measured, which misses the target."""
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the value reaches the target."""
        if self.value is None:
            return False
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted

    @property
    def condition(self) -> str:
        """The target as text."""
        return f"{'<=' if self.at_most else '>='} {self.wanted:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict(Verdict):
    """A verdict on one case of a benchmark."""

    case: str
