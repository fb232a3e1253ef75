"""Measurements as values: of one configuration, and of all of them on one cluster."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from head_to_head.engine import Configuration
from head_to_head.task import Task

MicroBatches = tuple[tuple[int, ...], ...]
"""Samples of each pass, by rank."""
TURN_STEPS = 5
"""Steps of a turn. Short turns spread other load on the machine over all configurations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one configuration."""

    configuration: Configuration
    step_seconds: tuple[float, ...] = ()
    """Seconds of each counted step on the slowest rank, from the end of the previous step."""
    losses: tuple[float, ...] = ()
    """Mean loss of the global batch at every step, warm-up included."""
    predicted_seconds: float | None = None
    """Step time predicted before the first step ran; None for peers."""
    peak_memory: tuple[int, ...] = ()
    """Bytes above what the process held before the engine was built, by rank that takes part."""
    absent: str = ""
    """Why there is no result; empty if there is one."""

    @property
    def turns(self) -> tuple[tuple[float, ...], ...]:
        """Step seconds by round."""
        starts = range(0, len(self.step_seconds), TURN_STEPS)
        return tuple(self.step_seconds[start : start + TURN_STEPS] for start in starts)

    @property
    def median_seconds(self) -> float:
        """Median step time."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """Speed at the median step."""
        return self.configuration.plan.global_batch / self.median_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Speed of the ranks without an engine, all ranks measured at once."""

    speeds: tuple[float, ...]
    """Samples per second of plain passes at the best batch that fits, by rank."""
    batches: tuple[int, ...]
    """That batch, by rank."""
    rank_flops: tuple[float, ...]
    """fp32 operations per second in large matrix products, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All measurements of one run on one cluster."""

    began: str
    """Day and time."""
    cluster: str
    """Its name: `2:1:1`."""
    described: str
    """One sentence: quotas, cores, memory caps, links."""
    unequal: bool
    task: Task
    flops_per_sample: float
    """Forward and backward in plain PyTorch."""
    parameters: int
    before: Calibration
    after: Calibration
    turns: tuple[tuple[float, ...], ...] = ()
    """Speeds of plain passes by round and rank; they take turns with the configurations."""
    even_seconds: tuple[float, ...] = ()
    """By round: seconds until all ranks finished the even split in plain passes."""
    in_step: Mapping[MicroBatches, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By split and round: seconds of steps of plain passes with a barrier after each."""
    ideal_over_even: dict[int, float]
    """Ideal speed-up over the even split, by stage: seconds of the even split in plain passes over
    seconds at the sum of speeds, both plus the transfer time of a slow link."""
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    """Conditions that affect the results: drift, pauses of quotas, skipped parts."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each rank in plain passes: the median of its turns."""
        turns = self.turns or (self.before.speeds, self.after.speeds)
        return tuple(statistics.median(by_round) for by_round in zip(*turns, strict=True))

    @property
    def sum_of_speeds(self) -> float:
        """The calibration."""
        return sum(self.speeds)

    def of_sum_of_speeds(self, outcome: Outcome) -> float:
        """Median over rounds of the speed in its turn over the plain passes of that round."""
        if not self.turns:
            return outcome.samples_per_second / self.sum_of_speeds
        batch = outcome.configuration.plan.global_batch
        return statistics.median(
            len(seconds) * batch / sum(seconds) / sum(speeds)
            for seconds, speeds in zip(outcome.turns, self.turns, strict=False)
        )

    def of_sum_in_step(self, outcome: Outcome) -> float | None:
        """The same for plain passes of its split with a barrier after each step."""
        plan = outcome.configuration.plan
        of_sum = [
            len(seconds) * plan.global_batch / sum(seconds) / sum(speeds)
            for seconds, speeds in zip(
                self.in_step.get(plan.micro_batches, ()), self.turns, strict=False
            )
        ]
        return statistics.median(of_sum) if of_sum else None

    @property
    def largest_sum_of_speeds(self) -> float:
        """The larger sum of the calibrations before and after the run."""
        return max(sum(self.before.speeds), sum(self.after.speeds))

    @property
    def drift(self) -> float:
        """Largest relative change of a rank's calibrated speed during the run."""
        return max(
            abs(late / early - 1)
            for early, late in zip(self.before.speeds, self.after.speeds, strict=True)
        )
