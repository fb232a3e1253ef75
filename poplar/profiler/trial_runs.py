"""Runs plans on the engine, in turns, and returns what their steps took.

The only place where Poplar runs a plan to measure it: `profile_cluster` calibrates the cost model
with it, `autotune` compares the best plans with it. The parameters of the model are restored after
every run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean

from poplar.observation import Observation
from poplar.optimizer import HeteroZeroOptimizer
from poplar.plan import Plan
from poplar.profile import ClusterProfile
from poplar.profiler.engine_steps import observe
from poplar.profiler.passes import SHORTEST_SAMPLE_SECONDS, time_sizes
from poplar.profiler.preserved_state import computing_in, parameters_preserved
from poplar.profiler.progress import Report
from poplar.profiler.session import Session

FEWEST_STEPS = 2
"""Timed steps of a plan in a turn, after one that is not timed."""
MOST_STEPS = 5
"""The same on a quiet machine. On a noisy one more turns help more than more steps."""
PLAIN_PASSES = 0.4
"""Part of the time for plain passes before, between and after the steps."""


def run_plan(session: Session, plan: Plan, *, steps: int, report: Report) -> Observation:
    """Time so many steps of a plan. Collective."""
    request = session.request
    report(f"steps at stage {plan.stage}")
    with parameters_preserved(request.model, to_host=session.asynchronous):
        optimizer = HeteroZeroOptimizer(
            request.model,
            request.optimizer_class,
            plan=plan,
            process_group=session.group.process_group,
            units=request.units,
            compute_dtype=request.compute_dtype,  # type: ignore[arg-type]
            reduce_dtype=request.reduce_dtype,
            timeout=session.group.timeout,
            allow_batch_norm=request.allow_batch_norm,
            **request.optimizer_options,
        )
        try:
            seen = observe(
                optimizer,
                plan,
                session.passes(),
                session.control,
                steps=steps,
                max_norm=request.max_norm,
            )
            optimizer.release()
        except BaseException:
            optimizer._detach()  # the error's frames still refer to it
            raise
        del optimizer
        if session.asynchronous:
            gc.collect()  # Python does not see how much device memory a reference cycle holds
    return seen


def run_in_turns(
    session: Session,
    profile: ClusterProfile,
    groups: Sequence[Sequence[Plan]],
    *,
    seconds: float,
    noise: float,
    report: Report,
) -> list[list[Observation]]:
    """Run groups of plans in turns, so that a slow moment of a device affects all groups.

    Args:
        session: of this rank.
        profile: curves of the ranks, to compare plain passes with.
        groups: plans; between the plans of a group plain passes are timed (`slowdowns`).
        seconds: time budget; the first turn always runs.
        noise: as many turns, if there is time.
        report: shows progress.

    Returns:
        Observations by turn, the same on every rank.
    """
    budget = session.from_first_rank(seconds)
    lengths = [_lengths(profile, plans, budget / len(groups), noise) for plans in groups]
    turns: list[list[Observation]] = []
    began = time.perf_counter()
    for turn in range(math.ceil(noise) if groups else 0):
        if turn:
            expected = (time.perf_counter() - began) * (turn + 1) / turn
            if session.from_first_rank(expected) > budget:
                break
        seen: list[Observation] = []
        for plans, (steps, plain) in zip(groups, lengths, strict=True):
            seen += _run_beside_plain_passes(session, profile, plans, steps, plain, report)
        turns.append(seen)
    return turns


def _lengths(
    profile: ClusterProfile, plans: Sequence[Plan], seconds: float, noise: float
) -> tuple[int, float]:
    """Steps of each plan in a turn, and seconds of each series of plain passes.

    Args:
        profile: curves of the ranks.
        plans: of one group.
        seconds: for all turns of this group.
        noise: 1 on a quiet machine.
    """
    one_pass = max(
        device.seconds(max(sizes, default=0))
        for device, sizes in zip(profile.devices, plans[0].micro_batches, strict=True)
    )
    passes = sum(max(map(len, plan.micro_batches)) for plan in plans)
    one_step_of_each = one_pass * passes
    affordable = int(seconds * (1.0 - PLAIN_PASSES) / one_step_of_each) - 1
    most = MOST_STEPS if noise <= 1.0 else FEWEST_STEPS
    steps = max(FEWEST_STEPS, min(most, affordable))
    plain = max(SHORTEST_SAMPLE_SECONDS, PLAIN_PASSES * steps * one_step_of_each)
    return steps, min(plain, PLAIN_PASSES * seconds / (len(plans) + 1))


def _run_beside_plain_passes(
    session: Session,
    profile: ClusterProfile,
    plans: Sequence[Plan],
    steps: int,
    plain_seconds: float,
    report: Report,
) -> list[Observation]:
    observations = []
    before = measure_slowdowns(session, profile, plans[0], plain_seconds)
    for plan in plans:
        seen = run_plan(session, plan, steps=steps, report=report)
        after = measure_slowdowns(session, profile, plan, plain_seconds)
        slowdowns = map(fmean, zip(before, after, strict=True))
        observations.append(replace(seen, slowdowns=tuple(slowdowns)))
        before = after
    return observations


def measure_slowdowns(
    session: Session, profile: ClusterProfile, plan: Plan, seconds: float
) -> list[float]:
    """By rank, how long plain passes take now, relative to the profiled curve. Collective.

    Each rank times its largest profiled batch that is not above the plan's. If `seconds` are too
    few to measure anything, the factors are 1.
    """
    if seconds < SHORTEST_SAMPLE_SECONDS:
        return [1.0] * session.group.size
    device = profile.devices[session.group.rank]
    first, *others = device.points
    planned = max(plan.micro_batches[session.group.rank], default=0)
    known = max([first, *(p for p in others if p.batch <= planned)], key=attrgetter("batch"))
    passes = session.passes()

    def measure() -> float:
        (point,) = time_sizes(passes, [known], seconds=seconds, least=2)
        return point.seconds / known.seconds

    with computing_in(session.request.model, session.agreed.dtype):
        session.on_all_ranks(lambda: passes.run(known.batch), "a pass before timing")
        return session.on_all_ranks(measure, "timing passes between steps")
