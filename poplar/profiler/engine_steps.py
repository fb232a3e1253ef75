"""Whole steps of the engine, taken apart: what the closed form of a step leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from poplar.comm import Control
from poplar.optimizer import HeteroZeroOptimizer
from poplar.plan import Plan
from poplar.profiler.passes import Passes, error_of_median
from poplar.system.trace import Span


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One plan as it ran: medians over its steps, the same value on every rank."""

    plan: Plan
    step_seconds: float
    """From one step to the next, as training goes on."""
    spread_seconds: float = 0.0
    """The standard error of `step_seconds`; 0: not known, and taken for none."""
    pass_seconds: tuple[tuple[float, ...], ...]
    """`[rank][pass]` of those with samples, without waiting for others."""
    other_seconds: tuple[float, ...]
    """By rank: neither in a pass, nor in the update, nor waiting."""
    pass_errors: tuple[float, ...] = ()
    """By rank, the standard error of what a pass took; empty: not known, and taken for none."""

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """By rank, without the update."""
        return tuple(
            sum(own) + other
            for own, other in zip(self.pass_seconds, self.other_seconds, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    seconds: float
    passes: tuple[float, ...]
    other: float


def observe(
    optimizer: HeteroZeroOptimizer,
    plan: Plan,
    passes: Passes,
    control: Control,
    *,
    steps: int,
    warm_up: int,
    max_norm: float | None,
) -> Observation:
    """Run a plan for a few steps and take them apart. Collective."""
    rank = control.group.rank
    samples = plan.samples(rank)
    batch = passes.batch(samples) if samples else None
    for _ in range(warm_up):
        optimizer.train_step(passes.loss_fn, batch, max_norm=max_norm)
    own = [_one_step(optimizer, batch, passes, max_norm) for _ in range(steps)]
    everyones = control.exchange_objects(own, what="the profiler's steps")
    # A rank that is done early begins the next step early and waits there. So ranks agree over some
    # steps, and the longest of each step would add to a step what it took from the one before.
    together = [fmean(step.seconds for step in at) for at in zip(*everyones, strict=True)]
    return Observation(
        plan=plan,
        step_seconds=median(together),
        spread_seconds=error_of_median(together),
        pass_seconds=tuple(
            tuple(median(times) for times in zip(*(step.passes for step in own), strict=True))
            for own in everyones
        ),
        other_seconds=tuple(median(step.other for step in own) for own in everyones),
        pass_errors=tuple(_error_of_passes(own) for own in everyones),
    )


def _error_of_passes(own: Sequence[_Step]) -> float:
    """Of the median over steps of each pass of one rank; 0 without passes."""
    errors = [error_of_median(times) for times in zip(*(step.passes for step in own), strict=True)]
    return median(errors) if errors else 0.0


def _one_step(
    optimizer: HeteroZeroOptimizer, batch: Any, passes: Passes, max_norm: float | None
) -> _Step:
    passes.synchronize()
    began = time.perf_counter()
    with optimizer.trace() as spans:
        optimizer.train_step(passes.loss_fn, batch, max_norm=max_norm)
        passes.synchronize()
    seconds = time.perf_counter() - began
    waits = [span for span in spans if span.kind == "wait"]
    own = [
        span for span in spans if span.kind == "pass" and not span.what.startswith("a pass of 0")
    ]
    busy = tuple(span.seconds - sum(w.seconds for w in waits if _inside(w, span)) for span in own)
    update = sum(span.seconds for span in spans if span.kind == "optimizer")
    outside = sum(wait.seconds for wait in waits if not any(_inside(wait, span) for span in own))
    other = seconds - sum(span.seconds for span in own) - update - outside
    return _Step(seconds=seconds, passes=busy, other=other)


def _inside(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
