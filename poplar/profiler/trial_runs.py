"""Runs plans on the engine, and in turns beside plain passes that show how fast the devices are.

The only place where Poplar runs a plan to measure it: `profile_cluster` calibrates the cost model
with it, `autotune` compares the best plans with it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch

from poplar.optimizer import HeteroZeroOptimizer
from poplar.profiler.batch_curves import time_again
from poplar.profiler.compilation import frames_compiled
from poplar.profiler.engine_passes import built_optimizer, put_back_on_meta
from poplar.profiler.progress import Report
from poplar.profiler.session import Session
from poplar.profiler.timing import SHORTEST_SAMPLE_SECONDS
from poplar.system.devices import synchronize
from poplar.system.out_of_memory import free_cached_memory, free_failed_pass, is_out_of_memory
from poplar.system.trace import Span
from poplar.values.errors import CollectiveTimeout, PoplarError, agreed, is_agreed
from poplar.values.formatting import format_ranks
from poplar.values.observation import Observation
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.zero.agreement import run_on_all_ranks

T = TypeVar("T")

WARM_UP_STEPS = 5
"""Steps that are not timed, at most: the first, and others while a rank compiles in them."""
STEPS = 3
"""Timed steps of a plan in a turn, after the warm-up. On 200 simulated clusters with
unsteady devices, 2 to 4 steps gave calibrations of the same accuracy, within 10 %."""
PLAIN_PASSES = 0.4
"""Part of the time, at most, for plain passes before, between and after the plans."""


class _Step(NamedTuple):
    """Seconds of one step on one rank."""

    total: float
    passes: tuple[float, ...]
    other: float


class OutOfMemoryInTrial(PoplarError):
    """Memory ran out on some ranks in a trial; raised on all ranks."""

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        """`ranks`: on which memory ran out in `what`."""
        super().__init__(f"{format_ranks(ranks)} ran out of memory in {what}")
        self.ranks = tuple(ranks)


class Turns(NamedTuple):
    """What `run_in_turns` has seen."""

    observed: list[list[Observation]]
    errors: dict[int, Exception]
    """By stage at which plans cannot run, the error of this rank."""


def run_trial(
    run: Callable[[], T],
    what: str,
    exchange: Callable[[bool], Sequence[bool]],
    device: torch.device,
) -> T:
    """The result of a trial on this rank. Collective.

    Args:
        what: the trial, in errors.
        exchange: the values of all ranks. Collective.

    What a trial held that failed on all ranks is freed, so that another one can run.

    Raises:
        OutOfMemoryInTrial: on all ranks.
        Exception: whatever else `run` raised.
    """
    error: Exception | None = None
    try:
        result = run()
    except Exception as caught:  # also on ranks that could not finish because of another one
        if not is_agreed(caught):
            raise  # the others may still be in a step
        error = caught
    short = exchange(error is not None and is_out_of_memory(error))
    failure = error
    if any(short):
        ranks = [rank for rank, own in enumerate(short) if own]
        failure = agreed(OutOfMemoryInTrial(what, ranks))
    if failure is None:
        return result
    if error is not None:
        free_failed_pass(error)
    error = None  # its traceback holds functions, and they what they share with other functions
    gc.collect()  # the engine is a reference cycle
    free_cached_memory(device)
    raise failure


def run_plan(session: Session, plan: Plan, *, steps: int, report: Report) -> Observation:
    """Time steps of a plan, after a warm-up; restores the parameters. Collective.

    Raises:
        OutOfMemoryInTrial: the plan needs more memory than predicted.
        CollectiveTimeout: a rank was lost, or could not even complete a pass with the others.
        Exception: whatever else the plan or the loss raised. If it `is_agreed`, it has failed on
            all ranks, which can run another plan.
    """
    report(f"steps at stage {plan.stage}")
    what = f"a step of stage {plan.stage} with micro-batches {plan.micro_batches}"
    run = partial(_timed_steps, session, plan, steps)
    try:
        own = run_trial(run, what, session.exchange, session.device)
    except Exception as error:
        if is_agreed(error):
            session.on_all_ranks(lambda: put_back_on_meta(session), "a failed trial")
        raise
    return _observation(plan, session.exchange(own))


def _timed_steps(session: Session, plan: Plan, steps: int) -> list[_Step]:
    job, samples = session.job, plan.samples(session.group.rank)
    batch = run_on_all_ranks(
        session.control,
        lambda: session.passes().step_batch(samples) if samples else None,
        doing="allocating a batch",
    )
    options = job.optimizer_options
    with built_optimizer(session, plan, job.optimizer_class, options) as optimizer:
        # The optimizer is dropped anyway; the ranks can go on together if this one is too small.
        if optimizer.is_active:
            optimizer._training.engine.allow_loss_of(optimizer._training.update.drop_state)
        try:
            for _ in range(WARM_UP_STEPS):
                before = frames_compiled()
                _run_step(session, optimizer, batch)
                if not any(session.exchange(frames_compiled() != before)):
                    break
            return [_run_step(session, optimizer, batch) for _ in range(steps)]
        except Exception as error:
            if not optimizer.control.group.failures:
                raise
            # This rank has stopped all ranks, and the others raise this, too.
            raise CollectiveTimeout(str(error)) from error


def _observation(plan: Plan, by_rank: Sequence[Sequence[_Step]]) -> Observation:
    # The mean over ranks, not the slowest rank: a rank that ends a step early begins the next one
    # early and waits there. Over several steps all ranks take equally long.
    active = [by_rank[rank] for rank in plan.active_ranks]
    means = [fmean(step.total for step in at) for at in zip(*active, strict=True)]
    return Observation(
        plan=plan,
        step_seconds=median(means),
        pass_seconds=tuple(
            tuple(median(times) for times in zip(*(step.passes for step in own), strict=True))
            for own in by_rank
        ),
        other_seconds=tuple(median(step.other for step in own) for own in by_rank),
    )


def _run_step(session: Session, optimizer: HeteroZeroOptimizer, batch: Any) -> _Step:
    job = session.job
    synchronize(session.device)
    began = time.perf_counter()
    with optimizer.trace() as spans:
        optimizer.train_step(job.loss_fn, batch, max_norm=job.max_norm)
        synchronize(session.device)
    total = time.perf_counter() - began
    waits = [span for span in spans if span.kind == "wait"]
    passes = tuple(
        max(0.0, span.seconds - sum(wait.seconds for wait in waits if _is_inside(wait, span)))
        for span in spans
        if span.kind == "pass" and not span.what.startswith("a pass of 0")
    )
    waited = sum(wait.seconds for wait in waits)
    update = sum(span.seconds for span in spans if span.kind == "optimizer")
    return _Step(total, passes, other=total - sum(passes) - waited - update)


def _is_inside(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def take_turns(
    most: int, seconds: float, from_first_rank: Callable[[float], float]
) -> Iterator[int]:
    """Numbers of the turns of trials, while there is time for another one. Collective.

    Trials run in turns, so that a slow moment of a device affects all of them.

    Args:
        seconds: time budget; the first turn always runs.
        from_first_rank: the first rank's value. Collective.
    """
    began = time.perf_counter()
    for turn in range(most):
        expected = (time.perf_counter() - began) * (turn + 1) / max(turn, 1)
        if turn and from_first_rank(expected) > seconds:
            break
        yield turn


def run_in_turns(
    session: Session,
    profile: ClusterProfile,
    plans: Sequence[Plan],
    *,
    seconds: float,
    noise: float,
    report: Report,
) -> Turns:
    """Run plans in turns. Collective.

    The slowdowns of an observation compare plain passes before and after its plan with the profile.
    A plan that runs out of memory is not observed. Nor are those of a stage at which a plan fails
    on all ranks for another reason, such as a second-order gradient at stage 3: no plan of it can
    train this model with this loss.

    Args:
        seconds: time budget; the first turn always runs.
        noise: as many turns, if there is time.
    """
    plain_seconds = _plain_seconds(profile, plans, seconds)
    turns: list[list[Observation]] = []
    errors: dict[int, Exception] = {}
    for _ in take_turns(math.ceil(noise), seconds, session.from_first_rank):
        if not plans:
            break
        turns.append([])
        before = measure_slowdowns(session, profile, plans[0], plain_seconds)
        for plan in plans:
            if plan.stage in errors:
                continue
            try:
                seen = run_plan(session, plan, steps=STEPS, report=report)
            except OutOfMemoryInTrial as short:
                report(str(short))
                plans = [other for other in plans if other != plan]
                continue
            except Exception as error:
                if not is_agreed(error):
                    raise
                report(f"stage {plan.stage} is dropped: {error}")
                errors[plan.stage] = error
                plans = [other for other in plans if other.stage != plan.stage]
                continue
            after = measure_slowdowns(session, profile, plan, plain_seconds)
            turns[-1].append(with_slowdowns(seen, before, after))
            before = after
    observed = [[seen for seen in turn if seen.plan.stage not in errors] for turn in turns]
    return Turns(observed, errors)


def with_slowdowns(
    seen: Observation, before: Sequence[float], after: Sequence[float]
) -> Observation:
    """The observation between these slowdowns of the ranks."""
    return replace(
        seen,
        slowdowns=tuple(map(fmean, zip(before, after, strict=True))),
        slowdown_changes=tuple(
            late / early - 1.0 for early, late in zip(before, after, strict=True)
        ),
    )


def _plain_seconds(profile: ClusterProfile, plans: Sequence[Plan], seconds: float) -> float:
    """Seconds of each series of plain passes: together as long as all steps of a turn."""
    one_step_of_each = sum(
        max(
            sum(map(device.seconds, sizes))
            for device, sizes in zip(profile.devices, plan.micro_batches, strict=True)
        )
        for plan in plans
    )
    wanted = max(SHORTEST_SAMPLE_SECONDS, (1 + STEPS) * one_step_of_each / (len(plans) + 1))
    return min(wanted, PLAIN_PASSES * seconds / (len(plans) + 1))


def measure_slowdowns(
    session: Session, profile: ClusterProfile, plan: Plan, seconds: float
) -> list[float]:
    """How long plain passes of each rank take now, relative to its profile. Collective.

    Each rank times its largest profiled batch that is not above the plan's and fits beside all
    parameters. If there is none on a rank, or `seconds` are too few to measure anything, the
    factors are 1: an engine would have to be built for these passes alone.
    """
    unknown = [1.0] * session.group.size
    if seconds < SHORTEST_SAMPLE_SECONDS:
        return unknown
    limits = session.largest_unsharded or [device.max_batch for device in profile.devices]
    known = []
    for device, sizes, limit in zip(profile.devices, plan.micro_batches, limits, strict=True):
        first = device.points[0].batch
        largest = min(max([first, *sizes]), limit)
        if first > largest:
            return unknown
        known.append([point for point in device.points if point.batch <= largest][-1])
    measured = time_again(session, known, seconds=seconds)
    return [now.seconds / before.seconds for before, now in zip(known, measured, strict=True)]
