"""Times whole steps of the engine and splits them into passes, waiting, update and the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from poplar.comm import Control
from poplar.observation import Observation
from poplar.optimizer import HeteroZeroOptimizer
from poplar.plan import Plan
from poplar.profiler.passes import Passes
from poplar.system.trace import Span


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
    max_norm: float | None,
) -> Observation:
    """Run one step that is not timed, then time `steps` of them. Collective."""
    samples = plan.samples(control.group.rank)
    batch = passes.batch(samples) if samples else None
    optimizer.train_step(passes.loss_fn, batch, max_norm=max_norm)
    own = [_one_step(optimizer, batch, passes, max_norm) for _ in range(steps)]
    by_rank = control.exchange_objects(own, what="the profiler's steps")
    # The mean over ranks, not the slowest rank: a rank that ends a step early begins the next one
    # early and waits there. Over several steps all ranks take equally long.
    means = [fmean(step.seconds for step in at) for at in zip(*by_rank, strict=True)]
    return Observation(
        plan=plan,
        step_seconds=median(means),
        pass_seconds=tuple(
            tuple(median(times) for times in zip(*(step.passes for step in own), strict=True))
            for own in by_rank
        ),
        other_seconds=tuple(median(step.other for step in own) for own in by_rank),
    )


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
    busy = tuple(
        max(0.0, span.seconds - sum(wait.seconds for wait in waits if _is_inside(wait, span)))
        for span in own
    )
    update = sum(span.seconds for span in spans if span.kind == "optimizer")
    outside = sum(wait.seconds for wait in waits if not any(_is_inside(wait, span) for span in own))
    other = seconds - sum(span.seconds for span in own) - update - outside
    return _Step(seconds=seconds, passes=busy, other=other)


def _is_inside(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
