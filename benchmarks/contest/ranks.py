"""What a crew's processes do: build engines, take turns with them, measure."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from contest.crew import Here
from contest.engine import Engine, Entrant
from contest.task import Batch, Task
from poplar.system.trace import Span

MEMORY_STEPS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of one entrant, as one rank saw them; on a clock that all ranks share."""

    start: float
    ends: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(slots=True)
class Contender:
    """An engine and what it is fed."""

    engine: Engine
    batches: Iterator[Batch | None]


def import_engines(here: Here, family: str) -> None:
    """Import what this crew will play, before it becomes slow; what is missing says so later."""
    del here
    modules = {"poplar": "contest.ours", "torch": "contest.torch_engines"}
    with suppress(ImportError):
        importlib.import_module(modules.get(family, "contest.deepspeed_engine"))


def slow_down(here: Here) -> None:
    """From here on the rank is as slow as its cluster says; imports are behind it."""
    here.place.slow_down(here.rank)


def make_engine(task: Task, entrant: Entrant, rank: int) -> Engine:
    """The engine that an entrant names. Collective; every rank of the crew makes one.

    Raises:
        ImportError: it is not installed; says how it would be.
    """
    if entrant.provider == "poplar":
        from contest.ours import Poplar

        return Poplar(task, entrant, rank)
    if entrant.provider == "deepspeed":
        from contest.deepspeed_engine import make_peer
    else:
        from contest.torch_engines import make_peer
    return make_peer(task, entrant, rank)


def build(here: Here, task: Task, entrant: Entrant) -> None:
    """Make an entrant's engine and keep it for its turns."""
    here.kept[entrant.name] = new_contender(here, task, entrant)


def new_contender(here: Here, task: Task, entrant: Entrant) -> Contender:
    """An engine with its data."""
    engine = make_engine(task, entrant, here.rank)
    batches: Iterator[Batch | None] = iter(())
    if here.rank in entrant.ranks:
        batches = task.batches(entrant.plan, entrant.ranks.index(here.rank))
    return Contender(engine, batches)


def take_turn(here: Here, name: str, steps: int) -> Turn | None:
    """Some steps in a row; None on a rank that takes no part."""
    contender: Contender = here.kept[name]
    takes_part = here.rank in contender.engine.entrant.ranks
    # Loaded before the clock runs: what is held against each other are engines.
    batches = [next(contender.batches) for _ in range(steps)] if takes_part else []
    gc.collect()
    dist.barrier()
    if not takes_part:
        return None
    start, ends, losses = time.perf_counter(), [], []
    for batch in batches:
        losses.append(contender.engine.step(batch))
        ends.append(time.perf_counter())
    return Turn(start, tuple(ends), tuple(losses))


def trace_step(here: Here, name: str) -> tuple[Span, ...]:
    """The spans of the second of two more steps."""
    contender: Contender = here.kept[name]
    if here.rank not in contender.engine.entrant.ranks:
        return ()
    contender.engine.step(next(contender.batches))
    batch = next(contender.batches)
    with contender.engine.traced() as spans:
        contender.engine.step(batch)
    return tuple(spans)


def drop(here: Here, name: str) -> None:
    """Give an engine's memory back."""
    here.kept.pop(name).engine.close()
    gc.collect()


def peak_memory(here: Here, task: Task, entrant: Entrant) -> int:
    """Bytes of the peak of three steps above what the process held before the engine was built.

    Memory that several ranks have mapped counts for each in equal parts, so that ranks add up to
    what the host needs. A twin with a tiny model goes first: what an engine imports and sets up
    once is not counted. Linux only: peaks are those of the resident memory.
    """
    give_memory_back_at_once()
    twin = new_contender(here, replace(task, size="tiny"), entrant)
    _step(here, twin, MEMORY_STEPS)
    _let_go(twin)
    trim_heap()
    before = _status("VmRSS")
    contender = new_contender(here, task, entrant)
    # Every engine begins with the whole model on every rank; what counts is how it goes on.
    _step(here, contender, 1)
    Path("/proc/self/clear_refs").write_text("5")
    _step(here, contender, MEMORY_STEPS)
    peak = _status("VmHWM") - _counted_elsewhere()
    dist.barrier()  # all still have mapped what they share
    _let_go(contender)
    return peak - before


def _step(here: Here, contender: Contender, steps: int) -> None:
    if here.rank in contender.engine.entrant.ranks:
        for _ in range(steps):
            contender.engine.step(next(contender.batches))
    dist.barrier()


def _let_go(contender: Contender) -> None:
    contender.engine.close()
    gc.collect()
    dist.barrier()


def _counted_elsewhere() -> int:
    """Bytes of shared mappings, resident here, that other processes' parts account for."""
    total, shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # "7f00-7f10 rw-s ...": a mapping begins
            shared = "s" in values[0]
        elif shared and name in ("Rss:", "Pss:"):
            total += int(values[0]) * 1024 * (1 if name == "Rss:" else -1)
    return total


def give_memory_back_at_once() -> None:
    """Without caches of freed memory, glibc's and Poplar's, what is resident is live tensors.

    It costs a third of the speed: never in a process that is timed.
    """
    os.environ["POPLAR_MEMORY_CACHE"] = "off"
    mmap_threshold = -3
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 128 * 1024)


def trim_heap() -> None:
    """Give back what small allocations have left behind, or the next engine would reuse it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
