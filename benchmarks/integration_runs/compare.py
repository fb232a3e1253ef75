"""Takes turns of the ways to train one task on one cluster."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from head_to_head.clusters import Cluster
from head_to_head.workers import WorkerContext, Workers

import poplar
from integration_runs.row import Row
from integration_runs.task import Task, loss_fn
from integration_runs.ways import INTEGRATIONS, STAGES, WAYS, WITHOUT_WEIGHTS
from poplar import Plan

WARM_UP = 3
"""Steps of each turn that do not count: DDP rebuilds its buckets, Poplar learns its order."""
DEADLINE = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    integrations: tuple[str, ...]
    rounds: int
    steps: int
    """Counted steps of a turn."""
    seconds: float
    """Time budget of a profile."""


def compare(
    cluster: Cluster, task: Task, settings: Settings, log: Callable[[Any], object]
) -> list[Row]:
    """One row per integration.

    Raises:
        EmulationUnavailable: CPU quotas cannot be set here.
        WorkersFailed: a rank failed.
    """
    with cluster.opened() as opened, Workers(opened, "integrations") as workers:
        workers.call(_prepare, task, settings.integrations, timeout=DEADLINE)
        stages = sorted({STAGES.get(name, 0) for name in settings.integrations})
        plans = {
            stage: workers.call(_plan, task, stage, settings.seconds, timeout=DEADLINE)[0]
            for stage in stages
        }
        for plan in plans.values():
            log(plan)
        medians: dict[tuple[str, int], list[float]] = {}
        turns = [
            (way, STAGES.get(name, 0)) for name in settings.integrations for way in ways_of(name)
        ]
        for number in range(settings.rounds):
            order = list(dict.fromkeys(turns))
            for way, stage in order if number % 2 == 0 else reversed(order):
                arguments = (task, way, plans[stage], settings.steps)
                seconds = workers.call(_turn, *arguments, timeout=DEADLINE)
                # The slowest rank: all of them end a step together, give or take the update.
                medians.setdefault((way, stage), []).append(max(seconds))
                log(f"{way}: {max(seconds):.3f} s a step")
    return [
        Row.of(
            integration=name,
            task=task,
            cluster=cluster.name,
            plan=plans[STAGES.get(name, 0)],
            seconds=[medians[way, STAGES.get(name, 0)] for way in ways_of(name)],
        )
        for name in settings.integrations
    ]


def ways_of(integration: str) -> list[str]:
    """The ways that are measured of an integration."""
    engine = [WITHOUT_WEIGHTS[integration]] if integration in WITHOUT_WEIGHTS else []
    return [*INTEGRATIONS[integration], *engine]


def _prepare(context: WorkerContext, task: Task, integrations: tuple[str, ...]) -> None:
    """Import all libraries at full speed, then slow the rank down."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["LOCAL_WORLD_SIZE"] = str(context.size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    task.new_model()
    plan = Plan.even(context.size, task.samples, task.samples // context.size, 0)
    for name in integrations:
        own, with_poplar, _ = INTEGRATIONS[name]
        even = (
            plan
            if not STAGES.get(name)
            else Plan.even(context.size, task.samples, task.samples // context.size, STAGES[name])
        )
        for way in (own, with_poplar):
            WAYS[way](task, even, 1)
            gc.collect()
            dist.barrier()
    context.open_cluster.slow_down(context.rank)


def _plan(context: WorkerContext, task: Task, stage: int, seconds: float) -> Plan:
    """Batches for even shares, which DDP and FSDP2 have."""
    data = task.data()
    example = torch.utils.data.default_collate([data[at] for at in range(8)])
    return poplar.autotune(
        task.new_model(),
        loss_fn,
        example,
        global_batch=task.samples,
        stage=stage,
        policy="even_shares",
        seconds=seconds,
        cache=False,
        progress=False,
        weight=poplar.tokens(),
        lr=1e-4,
    )


def _turn(context: WorkerContext, task: Task, way: str, plan: Plan, steps: int) -> float:
    """The median step of a new model, in seconds."""
    gc.collect()
    dist.barrier()
    ends = WAYS[way](task, plan, WARM_UP + steps)
    gaps = [after - before for before, after in pairwise(ends)]
    dist.barrier()
    time.sleep(0.05)  # so that the quota's period begins afresh
    return statistics.median(gaps[WARM_UP - 1 :])
