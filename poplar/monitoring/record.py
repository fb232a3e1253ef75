"""The input of a report: a profile, and one or more runs that were measured under plans.

`step_seconds` are of the slowest rank, without the preparations of the first step.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from poplar.system.trace import Span
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import Document, Positive, PositiveCount, Rule, check_fields

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run under one plan."""

    name: str
    plan: Plan
    step_seconds: Annotated[tuple[Positive, ...], Rule("at least one step", bool)]
    """Of the slowest rank, step by step."""
    losses: tuple[float | None, ...] = ()
    """Of the global batch, step by step, None if not finite. May be more than `step_seconds`: the
    first step after each start of the training is not timed."""
    first_step: PositiveCount = 1
    """Number of the step of the first loss. The plans of one training have different ones."""
    predicted_step_seconds: Positive | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    """By rank, one traced step on one clock; empty: no step was traced."""

    def __post_init__(self) -> None:
        check_fields(self)
        finite = (None if loss is None or not math.isfinite(loss) else loss for loss in self.losses)
        object.__setattr__(self, "losses", tuple(finite))

    @property
    def measured_step_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """The global batch over the median step."""
        return self.plan.global_batch / self.measured_step_seconds

    @property
    def next_step(self) -> int:
        """Number of the step after the last one."""
        return self.first_step + max(len(self.losses), len(self.step_seconds))

    def before(self, step: int) -> Self | None:
        """The steps of this run before that one; None if no timed one is among them."""
        dropped = max(0, self.next_step - step)
        seconds = self.step_seconds[: max(0, len(self.step_seconds) - dropped)]
        losses = self.losses[: max(0, len(self.losses) - dropped)]
        return replace(self, step_seconds=seconds, losses=losses) if seconds else None

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured step, minus 1; None without a prediction."""
        if self.predicted_step_seconds is None:
            return None
        return self.predicted_step_seconds / self.measured_step_seconds - 1


@dataclass(frozen=True, kw_only=True)
class RunRecord(Document):
    """The content of a report; see `poplar.monitoring.write_report`."""

    _noun = "recorded run"
    _version = 3
    _remedy = "record the run again"

    title: str
    profile: ClusterProfile
    runs: Annotated[tuple[Run, ...], Rule("at least one run", bool)]
    """In the order they are shown. The last one ran the chosen plan."""
    sum_of_speeds: Positive | None = None
    """Samples per second of plain passes without communication, all ranks at once, added up."""

    def __post_init__(self) -> None:
        check_fields(self)
        for run in self.runs:
            if run.plan.world_size != self.profile.world_size:
                raise ValueError(
                    f"the plan of run {run.name!r} is for {run.plan.world_size} ranks, but the "
                    f"profile has {self.profile.world_size} devices; both must come from one job"
                )

    @property
    def chosen(self) -> Run:
        """The run of the plan that was chosen."""
        return self.runs[-1]
