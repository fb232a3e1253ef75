"""Times two trainings of one model in turns, because a prediction of either may be wrong.

As `autotune` does with plans: both run on the same ranks in the same minutes, so a slow moment
affects both. The model is unchanged afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from poplar.comm import Control
from poplar.profiler.progress import Report
from poplar.system.devices import synchronize
from poplar.training.job import Job
from poplar.training.training import DistributedTraining
from poplar.zero.preserved_state import host_copies, model_preserved, parameters_restored

TURNS = 3
STEPS = range(3, 16)
"""Timed steps of a training in a turn: as many as the time budget allows."""
CLEAR = 1.25
"""One turn decides if one training is faster than the other by this factor."""
_MAX_NORM = 1.0


class Candidate(NamedTuple):
    """A training that may be chosen."""

    name: str
    build: Callable[[], DistributedTraining]
    """Collective."""
    step_seconds: float
    """Predicted."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured steps of two trainings, the same value on every rank."""

    first_seconds: float
    """Of a step, the median over turns."""
    second_seconds: float
    ratio: float
    """The first one's time over the second one's: the median over turns."""


def compare(
    job: Job, first: Candidate, second: Candidate, *, seconds: float, report: Report
) -> Comparison:
    """Time steps of both in turns. Collective.

    Args:
        job: whose model they train.
        first, second: in the first turn they run in this order.
        seconds: time budget; the first turn always runs.
        report: shows progress.
    """
    expected = first.step_seconds + second.step_seconds
    steps = min(max(int(seconds / TURNS / expected) - 1, STEPS[0]), STEPS[-1])
    copies, began = host_copies(job.model), time.perf_counter()
    turns: list[tuple[float, float]] = []
    with model_preserved(job.model, job.device):
        for turn in range(TURNS):
            taken = {}
            for candidate in (first, second)[:: -1 if turn % 2 else 1]:
                report(f"steps of the {candidate.name}")
                with parameters_restored(job.model, copies):
                    taken[candidate.name] = _step_seconds(job, candidate, steps)
            turns.append((taken[first.name], taken[second.name]))
            ratio = turns[-1][0] / turns[-1][1]
            spent = (time.perf_counter() - began) * (turn + 2) / (turn + 1)
            if max(ratio, 1 / ratio) > CLEAR or _from_first_rank(job.control, spent) > seconds:
                break
    return Comparison(
        first_seconds=median(seconds for seconds, _ in turns),
        second_seconds=median(seconds for _, seconds in turns),
        ratio=median(own / other for own, other in turns),
    )


def _step_seconds(job: Job, candidate: Candidate, steps: int) -> float:
    """Of the slowest rank, the mean over `steps` after one that is not timed. Collective."""
    training = candidate.build()
    batch: Any = job.example_part(training.plan)
    training.train_step(batch, max_norm=_MAX_NORM)
    synchronize(job.device)
    began = time.perf_counter()
    for _ in range(steps):
        training.train_step(batch, max_norm=_MAX_NORM)
    synchronize(job.device)
    own = (time.perf_counter() - began) / steps
    training.release()
    return max(job.control.exchange_objects(own, what="timing steps"))


def _from_first_rank(control: Control, value: float) -> float:
    return control.exchange_objects(value, what="timing steps")[0]
