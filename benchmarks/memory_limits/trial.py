"""One trial: do two steps of training fit into the limits of all ranks?

Every trial has its own processes. A rank that raises, ends or misses the deadline means that the
model does not fit.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import torch.distributed as dist
from head_to_head.engine import Configuration, Engine
from head_to_head.workers import WorkerContext, Workers, WorkersFailed, last_lines

from memory_limits import process_memory
from memory_limits.clusters import MemoryCluster
from memory_limits.engines import new_engine
from memory_limits.task import GrowingLlama
from poplar import Plan

STEPS = 2
"""The second step has the optimizer's state from its begin."""
DEADLINE = 300.0
GRACE_SECONDS = 2.0
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory")
BLOCKS_BEFORE = 2
"""Blocks of the model that is trained before the limit is set. See [Note: enforced limits]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a trial."""

    fits: bool
    seconds: float
    peaks: tuple[int, ...] = ()
    """By rank, resident bytes above the baseline; empty if it does not fit."""
    reason: str = ""
    """The last line of the first error, if it does not fit."""


def attempt(cluster: MemoryCluster, task: GrowingLlama, configuration: Configuration) -> Outcome:
    """Train in new processes under the cluster's limits.

    Raises:
        EngineMissing: the engine cannot train even a model of two blocks.
    """
    began = time.perf_counter()
    name = f"{configuration.name}, {task.blocks_count} blocks"
    with Workers(cluster.open(), name, grace_seconds=GRACE_SECONDS) as workers:
        try:
            workers.call(warm_up, task, configuration, timeout=DEADLINE)
        except WorkersFailed as failure:
            raise EngineMissing(last_lines(str(failure))) from failure
        try:
            peaks = workers.call(
                _train_limited, cluster.limits, task, configuration, timeout=DEADLINE
            )
        except WorkersFailed as failure:
            seconds = time.perf_counter() - began
            return Outcome(fits=False, seconds=seconds, reason=first_cause(str(failure)))
    return Outcome(fits=True, seconds=time.perf_counter() - began, peaks=peaks)


class EngineMissing(RuntimeError):
    """An engine that is not installed or does not run here."""


def warm_up(context: WorkerContext, task: GrowingLlama, configuration: Configuration) -> None:
    """Train a model of `BLOCKS_BEFORE` blocks. See [Note: enforced limits]."""
    even = Plan.even(context.size, context.size, 1, configuration.plan.stage)
    small = task.with_blocks(BLOCKS_BEFORE)
    _trained(context, small, replace(configuration, plan=even)).close()
    dist.barrier()


def _train_limited(
    context: WorkerContext,
    limits: tuple[int, ...],
    task: GrowingLlama,
    configuration: Configuration,
) -> int:
    process_memory.release_freed_memory()
    before = process_memory.resident_bytes()
    with process_memory.limited_to(limits[context.rank]):
        dist.barrier()
        process_memory.reset_peak()
        engine = _trained(context, task, configuration)
        peak = process_memory.peak_resident_bytes() - before
        dist.barrier()
    context.engines[configuration.name] = engine  # not closed: that may gather the whole model
    return peak


def _trained(context: WorkerContext, task: GrowingLlama, configuration: Configuration) -> Engine:
    engine = new_engine(task, configuration, context.rank)
    batch = task.batch(configuration.samples(context.rank))
    for _ in range(STEPS):
        engine.step(batch)
    return engine


def first_cause(failures: str) -> str:
    """The line that reports a failed allocation, else the last line of all tracebacks."""
    rank, found = "", ""
    for line in failures.splitlines():
        rank = line.partition(":")[0] if line.startswith("rank ") else rank
        if _OUT_OF_MEMORY.search(line):
            found = f"{rank}: {line.strip()}"
            break
    return found or last_lines(failures)
