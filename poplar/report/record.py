"""The input of a report: a profile, and one or more runs that were measured under plans.

Checked at construction: every plan and every trace is for the ranks of the profile. `step_seconds`
are of the slowest rank, without the preparations of the first step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poplar.plan import Plan
from poplar.profile import ClusterProfile
from poplar.system.trace import Span

_SCHEMA_VERSION = 2
_SPAN_KINDS = ("pass", "wait", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run under one plan."""

    name: str
    plan: Plan
    step_seconds: tuple[float, ...]
    """Of the slowest rank, step by step."""
    losses: tuple[float, ...] = ()
    """Of the global batch, step by step; may begin earlier than `step_seconds`."""
    predicted_step_seconds: float | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    """By rank, one traced step on one clock; empty: no step was traced."""

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        for what in ("step_seconds", "losses", "spans"):
            freeze(self, what, tuple(getattr(self, what)))
        if not self.step_seconds:
            raise ValueError(f"run {self.name!r} has no step_seconds; give at least one step")
        for seconds in self.step_seconds:
            _check_seconds(f"run {self.name!r}: step_seconds", seconds)
        if self.predicted_step_seconds is not None:
            _check_seconds(
                f"run {self.name!r}: predicted_step_seconds", self.predicted_step_seconds
            )
        if self.spans and len(self.spans) != self.plan.world_size:
            raise ValueError(
                f"run {self.name!r} has spans of {len(self.spans)} ranks, but its plan is for "
                f"{self.plan.world_size}; give one list per rank, or no list"
            )

    @property
    def measured_step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """The global batch over the median step."""
        return self.plan.global_batch / self.measured_step_seconds

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured step, minus 1; None without a prediction."""
        if self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.measured_step_seconds - 1


@dataclass(frozen=True, kw_only=True)
class SimilarPlan:
    """A plan similar to the chosen one, measured in turns with it."""

    plan: Plan
    step_seconds: float
    """The median step, of the slowest rank."""

    def __post_init__(self) -> None:
        _check_seconds("SimilarPlan.step_seconds", self.step_seconds)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a report; see `poplar.report.write_report`."""

    title: str
    profile: ClusterProfile
    runs: tuple[Run, ...]
    """In the order they are shown. The last one ran the chosen plan."""
    sum_of_speeds: float | None = None
    """Samples per second of plain passes without communication, all ranks at once, added up."""
    similar_plans: tuple[SimilarPlan, ...] | None = None
    """Plans measured in turns with the chosen one, which is included; None: not measured."""

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "runs", tuple(self.runs))
        if self.similar_plans is not None:
            freeze(self, "similar_plans", tuple(self.similar_plans))
        if not self.runs:
            raise ValueError("a RunRecord needs at least one run")
        names = [run.name for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"runs must have different names, got {names}")
        if self.sum_of_speeds is not None:
            _check_seconds("sum_of_speeds", self.sum_of_speeds)
        plans = [(f"run {run.name!r}", run.plan) for run in self.runs]
        plans += [(f"similar plan {i}", n.plan) for i, n in enumerate(self.similar_plans or ())]
        for whose, plan in plans:
            if plan.world_size != self.profile.world_size:
                raise ValueError(
                    f"the plan of {whose} is for {plan.world_size} ranks, but the profile has "
                    f"{self.profile.world_size} devices; both must come from one job"
                )

    @property
    def chosen(self) -> Run:
        """The run of the plan that was chosen."""
        return self.runs[-1]

    def to_dict(self) -> dict[str, Any]:
        """This record as JSON types; `from_dict` reads it."""
        return {
            "version": _SCHEMA_VERSION,
            "title": self.title,
            "profile": self.profile.to_dict(),
            "sum_of_speeds": self.sum_of_speeds,
            "runs": [_run_to_dict(run) for run in self.runs],
            "similar_plans": None
            if self.similar_plans is None
            else [
                {"plan": near.plan.to_dict(), "step_seconds": near.step_seconds}
                for near in self.similar_plans
            ],
        }

    @classmethod
    def from_dict(cls, content: Any) -> RunRecord:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: another schema version, unknown or missing fields, or invalid values.
        """
        if not isinstance(content, Mapping) or "version" not in content:
            raise ValueError("not a recorded run, which RunRecord.to_json writes")
        for key, what in (("micro_batches", "a plan"), ("devices", "a profile")):
            if key in content:
                raise ValueError(f"this is {what}, not a recorded run")
        if content["version"] != _SCHEMA_VERSION:
            raise ValueError(
                f"run format {content['version']!r}, but this version of Poplar reads format "
                f"{_SCHEMA_VERSION}; record the run again"
            )
        fields = {key: value for key, value in content.items() if key != "version"}
        try:
            fields["profile"] = ClusterProfile.from_dict(fields["profile"])
            fields["runs"] = tuple(_run_from_dict(run) for run in fields["runs"])
            if fields.get("similar_plans") is not None:
                fields["similar_plans"] = tuple(
                    SimilarPlan(**{**near, "plan": Plan.from_dict(near["plan"])})
                    for near in fields["similar_plans"]
                )
            return cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a run of format {_SCHEMA_VERSION}: {error}") from error

    def to_json(self, path: str | Path) -> None:
        """Write this record to a file that `from_json` reads."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> RunRecord:
        """Read a record that `to_json` wrote.

        Raises:
            ValueError: the file is damaged or not a record; names the file and the fault.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
            raise ValueError(f"{path}: {error}") from error


def _run_to_dict(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "plan": run.plan.to_dict(),
        "losses": list(run.losses),
        "step_seconds": list(run.step_seconds),
        "predicted_step_seconds": run.predicted_step_seconds,
        "spans": [[dataclasses.asdict(span) for span in rank] for rank in run.spans],
    }


def _run_from_dict(content: Mapping[str, Any]) -> Run:
    spans = tuple(
        tuple(_checked_span(Span(**span)) for span in rank) for rank in content.get("spans", ())
    )
    return Run(**{**content, "plan": Plan.from_dict(content["plan"]), "spans": spans})


def _checked_span(span: Span) -> Span:
    if span.kind not in _SPAN_KINDS:
        raise ValueError(f"a span's kind is one of {', '.join(_SPAN_KINDS)}, got {span.kind!r}")
    if not (_is_finite(span.start) and _is_finite(span.stop) and span.start <= span.stop):
        raise ValueError(
            f"the span {span.what!r} must start before it stops, got {span.start!r} to "
            f"{span.stop!r}"
        )
    return span


def _check_seconds(what: str, value: Any) -> None:
    if not (_is_finite(value) and value > 0):
        raise ValueError(f"{what} must be finite and above 0, got {value!r}")


def _is_finite(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)
