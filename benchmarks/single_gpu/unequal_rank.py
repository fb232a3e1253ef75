"""What each rank of `gpu_unequal.py` does: measure speeds, tune, then run the plans in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, next_byte_loss
from rows import Row
from torch import Tensor, nn

import poplar
from poplar import Plan
from poplar.pair.speed import Speed, control_group, measure_speeds, sum_of_speeds
from single_gpu import nccl
from single_gpu.cases import Batch, Case
from single_gpu.engines import (
    DTYPE,
    LEARNING_RATE,
    MAX_NORM,
    PEERS,
    PLAIN,
    Engine,
    make_engine,
    read,
)

WARMUP_STEPS = 3
MEMORY = 0.9
"""Of the GPU, for the allocators of all ranks together."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared. The same on all ranks."""

    case: Case
    percent: tuple[float, ...]
    """By rank, of the GPU's multiprocessors or of the cores."""
    nccl: bool
    stage: int | str
    seconds: float
    """Time budget of `tune`."""
    speed_seconds: float
    """For the plain passes, before and after the turns."""
    turn_seconds: float
    """Of one engine."""
    rounds: int

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.case.batch * dist.get_world_size()


def compare(settings: Settings, device: torch.device) -> Row:
    """Tune, then run the even and the planned step and the peers in turns. Collective."""
    case, group = settings.case, control_group()
    limit = _limit_memory(settings, device)
    before = _plain_speeds(settings, device, group)
    began = time.perf_counter()
    tuned = poplar.tune(
        case.new_model(device),
        next_byte_loss,
        case.new_batch(8, device),
        global_batch=settings.global_batch,
        stage=settings.stage,
        seconds=settings.seconds,
        memory_limit=limit,
        max_norm=MAX_NORM,
        compute_dtype=DTYPE,
        cache=False,
        progress=False,
        leave_out="never",
        lr=LEARNING_RATE,
    )
    tune_seconds = time.perf_counter() - began
    even = poplar.search(
        tuned.profile,
        global_batch=settings.global_batch,
        stages=(tuned.plan.stage,),
        policy="even",
    )
    engines, absent = _build(settings, device, group, even, tuned.plan)
    turns = run_turns(engines, settings, device, group)
    after = _plain_speeds(settings, device, group)
    best = max(before, after, key=sum_of_speeds)
    config = case.model
    what = {
        "ranks": dist.get_world_size(),
        "mps_percent": settings.percent,
        "backend": f"nccl {nccl.loaded_version()}" if settings.nccl else "gloo",
        "model": f"llama width {config.width}, {config.layers} layers, context {config.context}",
        "global_batch": settings.global_batch,
    }
    figures = {
        "stage_chosen": tuned.plan.stage,
        "samples": [tuned.plan.samples(rank) for rank in range(dist.get_world_size())],
        "even_ms": 1e3 * turns["even"],
        "planned_ms": 1e3 * turns["planned"],
        "predicted_ms": 1e3 * poplar.predict(tuned.profile, tuned.plan).step_seconds,
        "tune_seconds": tune_seconds,
        # At the sum of the ranks' speeds in plain passes, which all of them run at once.
        "ideal_ms": 1e3 * settings.global_batch / sum_of_speeds(best),
        "speeds": [speed.samples_per_second for speed in best],
        # DDP and FSDP2 with even batches on the same ranks, and why one has no result.
        "peers_ms": {name: 1e3 * turns[name] for name in turns.keys() & PEERS.keys()},
        "absent": absent,
        "peak_GiB": [peak / GIB for peak in _gather(_peak(device), group) if peak],
        "rounds": settings.rounds,
    }
    return Row.of("gpu_unequal", what, figures, device=device.type)


def run_turns(
    engines: dict[str, tuple[Engine, Batch]],
    settings: Settings,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Seconds of a step of each engine, the median over turns; the order alternates. Collective."""
    turns: dict[str, list[float]] = {name: [] for name in engines}
    steps = dict.fromkeys(engines, 1)
    for number in range(settings.rounds + 1):
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            engine, batch = engines[name]
            seconds = _turn(lambda e=engine, b=batch: e.step(b), steps[name], device, group)
            if number:  # the first turn is not counted
                turns[name].append(seconds)
            steps[name] = max(2, round(settings.turn_seconds / seconds))
    for engine, _ in engines.values():
        engine.close()
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def _turn(
    step: Callable[[], object], steps: int, device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Seconds a step, from the last rank's start to the last rank's end. Collective.

    All ranks are on one machine, so their clocks agree.
    """
    _synchronize(device)
    dist.barrier(group=group)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    times = _gather((began, time.perf_counter()), group)
    return (max(end for _, end in times) - max(start for start, _ in times)) / steps


def _build(
    settings: Settings,
    device: torch.device,
    group: dist.ProcessGroup | None,
    even: Plan,
    planned: Plan,
) -> tuple[dict[str, tuple[Engine, Batch]], dict[str, str]]:
    """The engines with their batches, and why others are absent. Collective."""
    engines: dict[str, tuple[Engine, Batch]] = {}
    absent: dict[str, str] = {}
    plans = {"even": even, "planned": planned}
    plans |= {name: even for name in PEERS if name != PLAIN}
    for name, plan in plans.items():
        if name in PEERS and device.type == "cuda" and not settings.nccl:
            absent[name] = "on a GPU it needs NCCL"
            continue
        try:
            engines[name], error = _warm(settings, device, name, plan), ""
        except Exception as failure:
            if name not in PEERS:
                raise
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        errors = [text for text in _gather(error, group) if text]
        if errors:
            engines.pop(name, None)
            absent[name] = errors[0]
    return engines, absent


def _warm(settings: Settings, device: torch.device, name: str, plan: Plan) -> tuple[Engine, Batch]:
    """An engine that has made its first steps, and this rank's batch."""
    rank = dist.get_rank()
    engine = make_engine(name, settings.case.new_model(device), plan, rank)
    batch = settings.case.new_batch(max(1, plan.samples(rank)), device, seed=rank)
    for _ in range(WARMUP_STEPS):
        loss = engine.step(batch)
    read(loss)
    return engine, batch


def _plain_speeds(
    settings: Settings, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Speed, ...]:
    """Speeds of the ranks in plain autocast passes, all at once. Collective."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device.type, DTYPE):
            return next_byte_loss(model, batch)

    model: Llama = settings.case.new_model(device)
    speeds = measure_speeds(
        model,
        loss_fn,
        lambda samples: settings.case.new_batch(samples, device),
        max_batch=2 * settings.case.batch,
        seconds=settings.speed_seconds,
        group=group,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return speeds


def _limit_memory(settings: Settings, device: torch.device) -> int | None:
    """Give each rank its part of the GPU's memory; returns it in bytes."""
    if device.type != "cuda":
        return None
    part = MEMORY * settings.percent[dist.get_rank()] / sum(settings.percent)
    torch.cuda.set_per_process_memory_fraction(part, device)
    return int(part * torch.cuda.get_device_properties(device).total_memory)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
