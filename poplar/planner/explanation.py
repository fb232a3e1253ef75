"""The values that `explain` returns: what bounds a plan, what would help, what each device adds.

Gains are fractions of samples per second: 0.12 is 12 % more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poplar.formatting import format_ranks, format_signed_percent

_SCHEMA_VERSION = 1
WORTH_IT, NOT_WORTH_IT, NEEDED = "worth it", "not worth it", "needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """What bounds the step of a plan."""

    what: str
    """`"compute"`, `"network"` or `"memory"`."""
    rank: int | None
    """The rank whose compute, link or memory it is; None: all ranks alike."""
    sentence: str
    """With the fraction of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of the cluster, and what the fastest plan gains from it."""

    what: str
    """`"memory"`, `"device"`, `"network"`, `"overlap"` or `"batches"` (larger than measured)."""
    ranks: tuple[int, ...]
    """The ranks whose memory or device changes; empty: something that all ranks share."""
    device: str
    """The name of their devices; empty: something that all ranks share."""
    amount: str
    """As text: "+8.00 GiB each"."""
    gain: float
    """Fraction by which samples per second grow."""
    stage: int
    """Of the fastest plan after the change."""

    def __str__(self) -> str:
        return f"{self.whose}: {self.amount} gives {format_signed_percent(self.gain)}"

    @property
    def whose(self) -> str:
        """What changes: `network`, `rank 3's memory` or `device of ranks 0-3`."""
        if not self.ranks:
            return self.what
        if len(self.ranks) == 1:
            return f"{format_ranks(self.ranks)}'s {self.what}"
        return f"{self.what} of {format_ranks(self.ranks)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What some ranks add, by the fastest plan of the same global batch without them."""

    ranks: tuple[int, ...]
    device: str
    without: float | None
    """Fraction by which samples per second change without these ranks; None: no plan fits then."""
    verdict: str
    """`"worth it"`; `"not worth it"`: they add no more than the error, or less than nothing;
    `"needed"`: without them no plan fits."""

    def __str__(self) -> str:
        if self.without is None:
            return f"without {format_ranks(self.ranks)}: no plan fits"
        advice = f": {self.advice}" if self.advice else ""
        return f"without {format_ranks(self.ranks)}: {format_signed_percent(self.without)}{advice}"

    @property
    def advice(self) -> str:
        """What to do; empty: nothing."""
        if self.without is None:
            return "needed: no plan fits without"
        if self.verdict == WORTH_IT:
            return ""
        if self.without > 0.0:
            return "leave it out" if len(self.ranks) == 1 else "leave them out"
        return f"{NOT_WORTH_IT}, within the error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why a plan takes as long as it does, what would change that, and what planning gains."""

    step_seconds: float
    """Predicted for the plan."""
    error: float
    """Relative error of a predicted step; smaller gains are not worth it."""
    bound: Bottleneck
    faster_plan: float
    """Fraction by which the fastest plan found is faster than this one; 0: none is faster."""
    over_even: float | None
    """Fraction by which this plan is faster than the best plan of policy "even", which gives every
    rank the same; None: no even plan fits."""
    verdict: str
    """Whether planning is `"worth it"`, `"not worth it"` or, if no even plan fits, `"needed"`."""
    changes: tuple[Change, ...]
    """What would help, largest gain first, without gains that are within the noise."""
    contributions: tuple[Contribution, ...]
    """One per group of devices, least valuable first; empty for a single rank."""
    doubts: tuple[str, ...] = ()
    """Where the plan relies on pass times that were not measured."""

    def sentences(self) -> list[str]:
        """What concerns the whole plan, as text."""
        sentences = [f"bound by {self.bound.sentence}"]
        if self.faster_plan > 0.0:
            sentences.append(f"another plan gives {format_signed_percent(self.faster_plan)}")
        sentences.append(self._gain_over_even())
        return sentences + [f"uncertain: {doubt}" for doubt in self.doubts]

    def _gain_over_even(self) -> str:
        if self.over_even is None:
            return "over an even plan: no even plan fits"
        gain = format_signed_percent(self.over_even)
        return f"over an even plan: {gain}, error ±{100 * self.error:.3g} %: {self.verdict}"

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *map(str, (*self.changes, *self.contributions))])

    def to_dict(self) -> dict[str, Any]:
        """This explanation as JSON types; `from_dict` reads it."""
        content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {"version": _SCHEMA_VERSION, **content}

    @classmethod
    def from_dict(cls, content: Any) -> Explanation:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: another schema version, unknown or missing fields.
        """
        if not isinstance(content, Mapping) or content.get("version") != _SCHEMA_VERSION:
            raise ValueError(
                f"not an explanation of format {_SCHEMA_VERSION}, which Explanation.to_dict writes"
            )
        fields = {key: value for key, value in content.items() if key != "version"}
        try:
            fields["bound"] = Bottleneck(**fields["bound"])
            fields["changes"] = tuple(_from_dict(Change, one) for one in fields["changes"])
            fields["contributions"] = tuple(
                _from_dict(Contribution, one) for one in fields["contributions"]
            )
            fields["doubts"] = tuple(fields.get("doubts", ()))
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an explanation of format {_SCHEMA_VERSION}: {error}") from error

    def to_json(self, path: str | Path) -> None:
        """Write this explanation to a file that `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> Explanation:
        """Read an explanation that `to_json` wrote.

        Raises:
            ValueError: the file is damaged or not an explanation; names the file and the fault.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _from_dict(kind: type[Any], content: Mapping[str, Any]) -> Any:
    return kind(**{**content, "ranks": tuple(content["ranks"])})
