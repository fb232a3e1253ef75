"""What was measured: of one entrant, and of all of them on one cluster. Values only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from contest.engine import Entrant
from contest.task import Task
from poplar.system.trace import Span

MicroBatches = tuple[tuple[int, ...], ...]
"""Samples of each pass, by rank."""
TURN_STEPS = 5
"""Short turns: what else the machine does should hit all alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One entrant's result."""

    entrant: Entrant
    step_seconds: tuple[float, ...] = ()
    """Of each step that counts: from the end of the step before on the slowest rank to its own."""
    losses: tuple[float, ...] = ()
    """Of the global batch, every step since the beginning, those of the warm-up included."""
    predicted_seconds: float | None = None
    """Of a step, said before the first one ran; None for peers."""
    spans: tuple[tuple[Span, ...], ...] = ()
    """What each rank that takes part did in one typical step."""
    peak_memory: tuple[int, ...] = ()
    """Bytes above what the process held before the engine was built, by rank that takes part."""
    absent: str = ""
    """Why there is no result: not installed, or how it failed."""

    @property
    def turns(self) -> tuple[tuple[float, ...], ...]:
        """The seconds of its steps, by round."""
        starts = range(0, len(self.step_seconds), TURN_STEPS)
        return tuple(self.step_seconds[start : start + TURN_STEPS] for start in starts)

    @property
    def median_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        """At the median step."""
        return self.entrant.plan.global_batch / self.median_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What the ranks can do on their own, all of them at once."""

    speeds: tuple[float, ...]
    """Samples per second of plain passes, by rank, at the best legal batch."""
    batches: tuple[int, ...]
    """That batch, by rank."""
    rank_flops: tuple[float, ...]
    """fp32 operations per second in large matrix products, by rank."""
    spins: tuple[float, ...]
    """Rounds per second of an empty loop, by rank."""

    @property
    def peak_flops(self) -> float:
        """Of all ranks together."""
        return sum(self.rank_flops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Everything that one run measured on one cluster."""

    began: str
    """Day and time."""
    cluster: str
    """Its name: `2:1:1`."""
    described: str
    """How it is made, in a sentence: quotas, cores, caps, links."""
    unequal: bool
    task: Task
    flops_per_sample: float
    """Forward and backward, of plain PyTorch."""
    parameters: int
    before: Calibration
    after: Calibration
    turns: tuple[tuple[float, ...], ...] = ()
    """Speeds of plain passes by round, by rank: they take turns with the entrants."""
    even_seconds: tuple[float, ...] = ()
    """By round: until all ranks were done with the even split, in plain passes."""
    in_step: Mapping[MicroBatches, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By split and round: seconds of steps of plain passes, after which ranks wait for each other
    and do nothing else."""
    ideal_over_even: dict[int, float]
    """By stage: how much faster than even the best split of samples could be: the time of the even
    split in plain passes over that of the sum of speeds (and, where there is a slow link, of the
    bytes that have to cross it)."""
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    """What a reader has to know: a drift, the quota's stall, what was skipped."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each rank on its own: the median of its turns, as entrants are judged by theirs."""
        turns = self.turns or (self.before.speeds, self.after.speeds)
        return tuple(statistics.median(by_round) for by_round in zip(*turns, strict=True))

    @property
    def sum_of_speeds(self) -> float:
        """The yardstick."""
        return sum(self.speeds)

    def of_sum_of_speeds(self, outcome: Outcome) -> float:
        """Median over rounds of what it did in its turn over the plain passes of that round."""
        if not self.turns:
            return outcome.samples_per_second / self.sum_of_speeds
        batch = outcome.entrant.plan.global_batch
        return statistics.median(
            len(seconds) * batch / sum(seconds) / sum(speeds)
            for seconds, speeds in zip(outcome.turns, self.turns, strict=False)
        )

    def of_sum_in_step(self, outcome: Outcome) -> float | None:
        """The same of plain passes of its split that do nothing but wait for each other."""
        plan = outcome.entrant.plan
        of_sum = [
            len(seconds) * plan.global_batch / sum(seconds) / sum(speeds)
            for seconds, speeds in zip(
                self.in_step.get(plan.micro_batches, ()), self.turns, strict=False
            )
        ]
        return statistics.median(of_sum) if of_sum else None

    @property
    def largest_sum_of_speeds(self) -> float:
        """Of before and after: what it would be if the machine stayed at its best."""
        return max(sum(self.before.speeds), sum(self.after.speeds))

    @property
    def drift(self) -> float:
        """Largest relative change of a rank's speed between before and after."""
        return max(
            abs(late / early - 1)
            for early, late in zip(self.before.speeds, self.after.speeds, strict=True)
        )
