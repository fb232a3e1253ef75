"""Functions that workers run: build engines, take turns of steps, measure memory."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import process_memory
import torch.distributed as dist

from head_to_head.engine import Configuration, Engine
from head_to_head.task import Batch, Task
from head_to_head.workers import WorkerContext

MEMORY_STEPS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of one configuration on one rank, timed by a clock that all ranks share."""

    start: float
    ends: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(slots=True)
class LoadedEngine:
    """An engine and its batches."""

    engine: Engine
    batches: Iterator[Batch | None]


def import_engines(context: WorkerContext, worker_group: str) -> None:
    """Import the engines before the rank is slowed down; missing ones are reported when built."""
    del context
    modules = {"poplar": "head_to_head.poplar_engine", "torch": "head_to_head.torch_engines"}
    with suppress(ImportError):
        importlib.import_module(modules.get(worker_group, "head_to_head.deepspeed_engine"))


def slow_down(context: WorkerContext) -> None:
    """Apply the speed that the cluster gives this rank."""
    context.open_cluster.slow_down(context.rank)


def make_engine(task: Task, configuration: Configuration, rank: int) -> Engine:
    """The engine of a configuration. Collective: every rank builds one.

    Raises:
        ImportError: the engine is not installed; the message says how to install it.
    """
    if configuration.provider == "poplar":
        from head_to_head.poplar_engine import Poplar, PoplarProgramme

        engine = Poplar if configuration.programme is None else PoplarProgramme
        return engine(task, configuration, rank)
    if configuration.provider == "deepspeed":
        from head_to_head.deepspeed_engine import DeepSpeed

        return DeepSpeed(task, configuration, rank)
    from head_to_head.torch_engines import TorchEngine

    return TorchEngine(task, configuration, rank)


def build(context: WorkerContext, task: Task, configuration: Configuration) -> None:
    """Build the engine of a configuration and store it for its turns."""
    context.engines[configuration.name] = load_engine(context, task, configuration)


def load_engine(context: WorkerContext, task: Task, configuration: Configuration) -> LoadedEngine:
    """An engine with its data."""
    engine = make_engine(task, configuration, context.rank)
    batches: Iterator[Batch | None] = iter(())
    if context.rank in configuration.ranks:
        batches = task.batches(configuration.plan, configuration.ranks.index(context.rank))
    return LoadedEngine(engine, batches)


def take_turn(context: WorkerContext, name: str, steps: int) -> Turn | None:
    """Run some steps in a row; None on a rank that the configuration does not use."""
    loaded: LoadedEngine = context.engines[name]
    takes_part = context.rank in loaded.engine.configuration.ranks
    # Loaded before the clock starts: engines are compared, not data loaders.
    batches = [next(loaded.batches) for _ in range(steps)] if takes_part else []
    gc.collect()
    dist.barrier()
    if not takes_part:
        return None
    start, ends, losses = time.perf_counter(), [], []
    for batch in batches:
        losses.append(loaded.engine.step(batch))
        ends.append(time.perf_counter())
    return Turn(start, tuple(ends), tuple(losses))


def peak_memory(context: WorkerContext, task: Task, configuration: Configuration) -> int:
    """Bytes of the peak of three steps above what the process held before the engine was built.

    Memory mapped by several ranks is split equally between them, so that the ranks' values sum to
    what the host needs. An engine with a tiny model runs first, so that one-time imports and
    set-up do not count. Linux only: the peak is that of resident memory.
    """
    process_memory.return_freed_memory()  # costs a third of the speed
    os.environ["POPLAR_MEMORY_CACHE"] = "off"
    twin = load_engine(context, replace(task, size="tiny"), configuration)
    _step(context, twin, MEMORY_STEPS)
    _let_go(twin)
    process_memory.release_freed_memory()
    before = process_memory.status("VmRSS")
    loaded = load_engine(context, task, configuration)
    # Every engine starts from the whole model on every rank; later steps count.
    _step(context, loaded, 1)
    process_memory.reset_peak()
    _step(context, loaded, MEMORY_STEPS)
    peak = process_memory.status("VmHWM") - _counted_elsewhere()
    dist.barrier()  # until all ranks have read their peak, shared memory stays mapped
    _let_go(loaded)
    return peak - before


def _step(context: WorkerContext, loaded: LoadedEngine, steps: int) -> None:
    if context.rank in loaded.engine.configuration.ranks:
        for _ in range(steps):
            loaded.engine.step(next(loaded.batches))
    dist.barrier()


def _let_go(loaded: LoadedEngine) -> None:
    loaded.engine.close()
    gc.collect()
    dist.barrier()


def _counted_elsewhere() -> int:
    """Bytes of resident shared mappings that are counted for other processes."""
    total, shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # "7f00-7f10 rw-s ...": a mapping begins
            shared = "s" in values[0]
        elif shared and name in ("Rss:", "Pss:"):
            total += int(values[0]) * 1024 * (1 if name == "Rss:" else -1)
    return total
