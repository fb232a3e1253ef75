"""Samples per second of plans with and without recomputation per rank, under enforced limits.

Ranks have CPU quotas of equal size. Both plans come from one profile, measured under the limits,
and take turns of a few steps. Every turn builds its engine, because two would not fit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from head_to_head.clusters import by_quota
from head_to_head.engine import Configuration
from head_to_head.workers import WorkerContext, Workers

from memory_limits import process_memory
from memory_limits.clusters import MemoryCluster
from memory_limits.engines import new_engine
from memory_limits.row import PLANNED, RecomputationRow
from memory_limits.task import GrowingLlama
from memory_limits.trial import warm_up
from poplar import ClusterProfile, Plan, predict, profile_cluster
from poplar.planner.search import plan_or_error

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE = 900.0
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how often."""

    task: GrowingLlama
    global_batch: int
    rounds: int
    steps: int
    """Of one turn, after one that warms up."""
    seconds: float
    """Time budget of the profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Steps of one plan on one rank."""

    seconds: float
    """Per step."""
    peak: int
    """Private bytes above those before the engine was built."""


def compare(
    cluster: MemoryCluster, settings: Settings, log: Callable[[str], None]
) -> RecomputationRow:
    """Plan and train with and without recomputation.

    Raises:
        EmulationUnavailable: CPU quotas cannot be set here.
        WorkersFailed: a rank failed, for example because it ran out of memory.
    """
    speeds = by_quota(cluster.name, [1.0] * cluster.size)
    with speeds.opened() as opened, Workers(opened, "recomputation") as workers:
        even = Plan.even(cluster.size, cluster.size, 1, max(STAGES))
        workers.call(warm_up, settings.task, _configuration(even), timeout=DEADLINE)
        workers.call(_slow_down)
        arguments = (cluster.limits, settings)
        profile = workers.call(_profile, *arguments, timeout=DEADLINE)[0]
        plans = {name: _planned(profile, settings, name) for name in ("never", "auto")}
        for name, plan in plans.items():
            log(f"recompute={name!r}: {plan}")
        seconds: dict[str, list[float]] = {name: [] for name in plans}
        peaks = dict.fromkeys(plans, (0,) * cluster.size)
        for number in range(settings.rounds):
            order = list(plans) if number % 2 == 0 else list(reversed(plans))
            for name in order:
                plan = plans[name]
                if not isinstance(plan, Plan):
                    continue
                turns = workers.call(_turn, *arguments, plan, timeout=DEADLINE)
                seconds[name].append(max(turn.seconds for turn in turns))
                own = [turn.peak for turn in turns]
                peaks[name] = tuple(map(max, own, peaks[name]))
                log(f"recompute={name!r}: {seconds[name][-1]:.3f} s per step")
    return _row(cluster, settings, profile, plans, seconds, peaks)


def _row(
    cluster: MemoryCluster,
    settings: Settings,
    profile: ClusterProfile,
    plans: dict[str, Plan | ValueError],
    seconds: dict[str, list[float]],
    peaks: dict[str, tuple[int, ...]],
) -> RecomputationRow:
    predicted = {
        name: predict(profile, plan).step_seconds
        for name, plan in plans.items()
        if isinstance(plan, Plan)
    }
    ratios = [never / auto for never, auto in zip(seconds["never"], seconds["auto"], strict=False)]
    both = len(predicted) == len(plans)
    return RecomputationRow.of(
        cluster=cluster,
        task=settings.task,
        global_batch=settings.global_batch,
        plans=plans,
        seconds={name: statistics.median(values) for name, values in seconds.items() if values},
        speed_up=statistics.median(ratios) if ratios else None,
        predicted_speed_up=predicted["never"] / predicted["auto"] if both else None,
        peaks=peaks,
    )


def _planned(profile: ClusterProfile, settings: Settings, recompute: Any) -> Plan | ValueError:
    return plan_or_error(
        profile, global_batch=settings.global_batch, stages=STAGES, recompute=recompute
    )


def _configuration(plan: Plan) -> Configuration:
    return Configuration(
        name=PLANNED,
        provider="poplar",
        stage=plan.stage,
        policy="exact",
        plan=plan,
        ranks=tuple(range(plan.world_size)),
    )


def _slow_down(context: WorkerContext) -> None:
    context.open_cluster.slow_down(context.rank)


@contextmanager
def _limited(limit: int) -> Iterator[None]:
    process_memory.release_freed_memory()
    with process_memory.limited_to(limit):
        yield


def _profile(context: WorkerContext, limits: tuple[int, ...], settings: Settings) -> ClusterProfile:
    task, limit = settings.task, limits[context.rank]
    with _limited(limit):
        return profile_cluster(
            task.new_model(),
            task.loss_fn,
            task.batch(1),
            optimizer_class=torch.optim.AdamW,
            stages=STAGES,
            memory_limit=limit,
            max_batch=settings.global_batch,
            seconds=settings.seconds,
            compute_dtype=torch.float32,
            device="cpu",
            cache=False,
            progress=False,
            lr=task.learning_rate,
        )


def _turn(context: WorkerContext, limits: tuple[int, ...], settings: Settings, plan: Plan) -> Turn:
    task = settings.task
    batch = task.batch(plan.samples(context.rank))
    with _limited(limits[context.rank]):
        before = process_memory.resident_bytes()
        process_memory.reset_peak()
        engine = new_engine(task, _configuration(plan), context.rank)
        engine.step(batch)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(settings.steps):
            engine.step(batch)
        dist.barrier()
        seconds = (time.perf_counter() - began) / settings.steps
        peak = process_memory.peak_resident_bytes() - before
        engine.optimizer.release(values=False)  # keeps nothing that would have to be unsharded
        del engine
    return Turn(seconds=seconds, peak=peak)
