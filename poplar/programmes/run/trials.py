"""Times a programme and a plan in turns, as plans are timed, and compares their first steps.

The model is unchanged afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from poplar.profiler.progress import Report
from poplar.profiler.trial_runs import run_trial, take_turns
from poplar.programmes.run.checked_export import are_close
from poplar.programmes.run.distributed_job import DistributedJob
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.system.devices import synchronize
from poplar.zero.preserved_state import host_copies, model_preserved, parameters_preserved

TURNS = 3
STEPS = range(3, 16)
"""Timed steps of a training in a turn: as many as the time budget allows."""
CLEAR = 1.25
"""One turn decides if one training is faster than the other by this factor."""
_MAX_NORM = 1.0
_ROUNDING, _ROUNDED = {torch.float64: 1e-6, torch.float32: 1e-3}, 5e-2
"""Relative differences of equal losses and norms, by the dtype of the computation, and of others.
They are sums over ranks, in another order."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured steps of both trainings, the same value on every rank."""

    programme_seconds: float
    """Seconds of a step by the programme, the median over turns."""
    plan_seconds: float
    ratio: float
    """The programme's time over the plan's, the median over turns."""
    difference: str = ""
    """How the first steps of both differ, which have the same samples and values."""


Build = Callable[..., DistributedTraining]
"""Makes a training for a reason. Collective."""


def compare(
    job: DistributedJob,
    by_programme: Build,
    by_plan: Build,
    *,
    expected: float,
    seconds: float,
    report: Report,
) -> Comparison:
    """Time steps of both in turns. Collective.

    Args:
        expected: predicted seconds of a step of each, together.
        seconds: time budget; the first turn always runs.

    Raises:
        OutOfMemoryInTrial: a rank ran out of memory in the programme, outside of the backward.
    """
    steps = min(max(int(seconds / TURNS / expected) - 1, STEPS[0]), STEPS[-1])
    copies = host_copies(job.model)

    exchange = partial(job.control.exchange_objects, what="timing steps")

    def from_first_rank(value: float) -> float:
        return exchange(value)[0]

    turns: list[tuple[float, float]] = []
    difference = ""
    with model_preserved(job.model, job.own_device):
        for turn in take_turns(TURNS, seconds, from_first_rank):
            taken = {}
            for name in ("programme", "plan")[:: -1 if turn % 2 else 1]:
                report(f"steps of the {name}")
                is_plan = name == "plan"
                run = partial(_Turn.of, job, by_plan if is_plan else by_programme, steps)
                what = "a trial of the programme"
                with parameters_preserved(job.model, copies):
                    taken[name] = (
                        run() if is_plan else run_trial(run, what, exchange, job.own_device)
                    )
            one, other = taken["programme"], taken["plan"]
            difference = difference or one.difference(other)
            turns.append((one.seconds, other.seconds))
            ratio = turns[-1][0] / turns[-1][1]
            if max(ratio, 1 / ratio) > CLEAR:
                break
    return Comparison(
        programme_seconds=median(seconds for seconds, _ in turns),
        plan_seconds=median(seconds for _, seconds in turns),
        ratio=median(own / other for own, other in turns),
        difference=difference,
    )


class _Turn(NamedTuple):
    """Some steps of a training, the same value on every rank."""

    seconds: float
    """Seconds of a step on the slowest rank, the mean over all but the first."""
    loss: float
    """Loss of the first step."""
    grad_norm: float
    rounding: float
    """Relative differences that the dtype of the computation explains."""

    @classmethod
    def of(cls, job: DistributedJob, build: Build, steps: int) -> _Turn:
        """Run `steps` timed steps after one that is not timed. Collective."""
        training = build(reason="")
        try:
            batch: Any = job.example_part(training.plan)
            first = training.train_step(batch, max_norm=_MAX_NORM)
            training._compares = False  # which later steps rarely do
            synchronize(job.own_device)
            began = time.perf_counter()
            for _ in range(steps):
                training.train_step(batch, max_norm=_MAX_NORM)
            synchronize(job.own_device)
            own = (time.perf_counter() - began) / steps
            loss, norm = float(first.loss), float(first.grad_norm or 0.0)
            training.release()
        except Exception:
            training._detach()
            raise
        rounding = max(_ROUNDING.get(p.dtype, _ROUNDED) for p in job.model.parameters())
        seconds = max(job.control.exchange_objects(own, what="timing steps"))
        return cls(seconds, loss, norm, rounding)

    def difference(self, plan: _Turn) -> str:
        """A sentence, if this programme and the plan are not trainings with the same gradient."""
        rounding = max(self.rounding, plan.rounding)
        for what in ("loss", "grad_norm"):
            values = getattr(self, what), getattr(plan, what)
            if not are_close(*values, rounding * max(map(abs, values))):
                return (
                    f"the {what} of a first step was {values[0]:.6g} by the programme and "
                    f"{values[1]:.6g} by the plan"
                )
        return ""
