"""What is said of a plan beyond its prediction, as values: what bounds it, and what would help.

`explain` fills them in. Gains are fractions of samples per second: 0.12 is 12 % more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poplar.formatting import format_ranks

_SCHEMA_VERSION = 1
WORTH_IT, NOT_WORTH_IT, NEEDED = "worth it", "not worth it", "needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """What bounds the step of a plan."""

    what: str
    """`"compute"`, `"network"` or `"memory"`."""
    rank: int | None
    """Whose; None: all ranks' alike."""
    sentence: str
    """For a person, with how much of the step it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of the cluster, and what the fastest plan on it gains."""

    what: str
    """`"memory"`, `"device"`, `"network"`, `"overlap"` or `"batches"` (larger than measured)."""
    ranks: tuple[int, ...]
    """Whose memory or device; empty: what all ranks share."""
    device: str
    """The name of those devices; empty: what all ranks share."""
    amount: str
    """How much of it, in words: "+8.00 GiB each"."""
    gain: float
    """Fraction by which samples per second grow."""
    stage: int
    """Of the fastest plan after the change."""

    def __str__(self) -> str:
        return f"{self.whose}: {self.amount} gives {signed_percent(self.gain)}"

    @property
    def whose(self) -> str:
        """What changes, as `rank 3's memory` or `device of ranks 0-3`."""
        if not self.ranks:
            return self.what
        one = len(self.ranks) == 1
        return (
            f"{format_ranks(self.ranks)}'s {self.what}"
            if one
            else f"{self.what} of {format_ranks(self.ranks)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """What some ranks are worth: the fastest plan of the same global batch without them."""

    ranks: tuple[int, ...]
    device: str
    without: float | None
    """Fraction by which samples per second change without them; None: then no plan fits."""
    verdict: str
    """`"worth it"`; `"not worth it"`: what they add is within the error, or less than nothing;
    `"needed"`: without them no plan fits."""

    def __str__(self) -> str:
        if self.without is None:
            return f"without {format_ranks(self.ranks)}: no plan fits"
        advice = f": {self.advice}" if self.advice else ""
        return f"without {format_ranks(self.ranks)}: {signed_percent(self.without)}{advice}"

    @property
    def advice(self) -> str:
        """What follows for a person; empty: nothing."""
        if self.without is None:
            return "needed: no plan fits without"
        if self.verdict == WORTH_IT:
            return ""
        if self.without > 0.0:
            return "leave it out" if len(self.ranks) == 1 else "leave them out"
        return f"{NOT_WORTH_IT}, within the error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why a plan takes as long as it does, what would change that, and whether it is worth it."""

    step_seconds: float
    """Predicted, of the plan."""
    error: float
    """Part of a predicted step that it may be off by; what is within it is no gain."""
    bound: Bottleneck
    faster_plan: float
    """Fraction by which the fastest plan that was found is faster than this one; 0: none is."""
    over_even: float | None
    """Fraction by which this plan is faster than the best one of policy "even", which gives every
    rank the same; None: no even plan fits."""
    verdict: str
    """Of planning at all: `"worth it"`, `"not worth it"` or, if no even plan fits, `"needed"`."""
    changes: tuple[Change, ...]
    """What would help, most first; what gains no more than noise is left out."""
    contributions: tuple[Contribution, ...]
    """Of each kind of device, those that are worth least first; empty: there is one rank only."""
    doubts: tuple[str, ...] = ()
    """Where the profile says little of what this plan does."""

    def sentences(self) -> list[str]:
        """What is said of the whole plan, for a person."""
        told = [f"bound by {self.bound.sentence}"]
        if self.faster_plan > 0.0:
            told.append(f"another plan gives {signed_percent(self.faster_plan)}")
        told.append(self._about_even())
        told += [f"doubt: {doubt}" for doubt in self.doubts]
        return told

    def _about_even(self) -> str:
        if self.over_even is None:
            return "over an even plan: none fits"
        gain = f"over an even plan: {signed_percent(self.over_even)}, give or take "
        return f"{gain}{100 * self.error:.3g} %: {self.verdict}"

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *map(str, (*self.changes, *self.contributions))])

    def to_dict(self) -> dict[str, Any]:
        """This explanation in JSON's types; `from_dict` gives it back."""
        content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {"version": _SCHEMA_VERSION, **content}

    @classmethod
    def from_dict(cls, content: Any) -> Explanation:
        """The explanation that `to_dict` wrote.

        Raises:
            ValueError: another schema version, unknown or missing fields.
        """
        if not isinstance(content, Mapping) or content.get("version") != _SCHEMA_VERSION:
            raise ValueError(
                f"this is no explanation of format {_SCHEMA_VERSION}, which Explanation.to_dict "
                "writes"
            )
        fields = {key: value for key, value in content.items() if key != "version"}
        try:
            fields["bound"] = Bottleneck(**fields["bound"])
            fields["changes"] = tuple(_of_ranks(Change, one) for one in fields["changes"])
            fields["contributions"] = tuple(
                _of_ranks(Contribution, one) for one in fields["contributions"]
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
            ValueError: the file is damaged or no explanation; names the file and what is wrong.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def signed_percent(fraction: float) -> str:
    """`+12 %`, `-0.4 %`: two digits, or the whole percent."""
    percent = 100 * fraction
    return f"{percent:+.0f} %" if abs(percent) >= 9.95 else f"{percent:+.1f} %"


def _of_ranks(kind: type[Any], content: Mapping[str, Any]) -> Any:
    return kind(**{**content, "ranks": tuple(content["ranks"])})
