"""Time all ways to train a model on one rank: in every round, each is built, timed and closed.

The larger models fit the GPU only one at a time, so no way stays alive while another one runs. The
order is reversed every other round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from llama import next_byte_loss
from rows import Row
from torch import nn

import poplar
from poplar import Plan
from single_gpu.cases import Batch, Case
from single_gpu.clock import StepClock
from single_gpu.engines import (
    DTYPE,
    LEARNING_RATE,
    MAX_NORM,
    ON_HOST,
    OURS,
    PEER,
    PLAIN,
    Engine,
    make_engine,
    read,
)
from single_gpu.step_report import MEMORY_OF

WARMUP_STEPS = 4
"""Compilation, first allocations, the collective order."""
TURN_STEPS = 8
BATCHES = 2
GIB = 2**30
PREDICTION_SECONDS = 12.0
Log = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """The measurements of one way, over all rounds."""

    seconds: list[list[float]] = field(default_factory=list)
    """Of each step, by round."""
    loss: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    failed: str = ""


def measure(
    case: Case,
    ways: Sequence[str],
    device: torch.device,
    *,
    compiler: str,
    rounds: int,
    seconds: float,
    predict: bool,
    log: Log,
) -> list[Row]:
    """One row per way.

    Args:
        case: the model and its batch.
        ways: names of engines.
        device: of this rank.
        compiler: backend of `torch.compile` for each block; empty: eager.
        rounds: at most this many.
        seconds: no further round starts that would end later.
        predict: also profile the model, to predict the memory at stage 3.
        log: receives one line per turn.
    """
    began = time.perf_counter()
    measured = {way: Measured() for way in ways}
    for number in range(rounds):
        start = time.perf_counter()
        for way in ways if number % 2 == 0 else reversed(ways):
            if not measured[way].failed:
                _take_turn(case, way, device, compiler, measured[way])
                log(f"{case.name}, {compiler or 'eager'}, round {number + 1}: {way}")
        now = time.perf_counter()
        if now - began + (now - start) > seconds:
            break
    predicted = None
    if predict and MEMORY_OF[1] in ways and not measured[MEMORY_OF[1]].failed:
        try:
            predicted = predicted_bytes(case, device)
        except Exception as error:
            log(f"{case.name}: no prediction of the memory: {type(error).__name__}: {error}")
    return [_row(case, way, measured, compiler, device, predicted) for way in ways]


def _take_turn(
    case: Case, way: str, device: torch.device, compiler: str, measured: Measured
) -> None:
    """Build, warm up, time and close one way; an error is recorded instead."""
    try:
        _release_memory(device, reset=True)
        measured.seconds.append(_steps(case, way, device, compiler, measured))
    except Exception as error:
        measured.failed = f"{type(error).__name__}: {error}".splitlines()[0]


def _steps(
    case: Case, way: str, device: torch.device, compiler: str, measured: Measured
) -> list[float]:
    plan = plan_of(case, OURS.get(way, 0))
    if way == ON_HOST:
        plan = replace(plan, host_state=(1.0,))
    engine = make_engine(way, compiled(case.new_model(device), compiler), plan)
    batches = [case.new_batch(case.batch, device, seed) for seed in range(BATCHES)]
    try:
        seconds = _timed_steps(engine, batches, device, measured)
    except BaseException:
        with suppress(Exception):  # an engine in the middle of a step: the first error counts
            engine.close()
        raise
    engine.close()
    return seconds


def _timed_steps(
    engine: Engine, batches: Sequence[Batch], device: torch.device, measured: Measured
) -> list[float]:
    """Seconds of each step after the warm-up; sets the loss and the memory."""
    for step in range(WARMUP_STEPS):
        loss = engine.step(batches[step % BATCHES])
    read(loss)
    clock = StepClock(device)
    clock.mark()
    for step in range(TURN_STEPS):
        loss = engine.step(batches[step % BATCHES])
        clock.mark()
    seconds = clock.seconds()
    measured.loss = read(loss)
    if device.type == "cuda":
        measured.allocated = torch.cuda.max_memory_allocated(device)
        measured.reserved = torch.cuda.max_memory_reserved(device)
    return seconds


def plan_of(case: Case, stage: int) -> Plan:
    """All samples of a step on the one rank."""
    return Plan.even(1, case.batch, case.batch // case.passes, stage)


def compiled(model: nn.Module, compiler: str) -> nn.Module:
    """The model, with compiled blocks if there is a compiler."""
    if compiler:
        for block in model.blocks:
            block.compile(backend=compiler)
    return model


def _release_memory(device: torch.device, *, reset: bool = False) -> None:
    # What was compiled for other ways would count towards the limit of recompilations.
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if reset:
            torch.cuda.reset_peak_memory_stats(device)


def predicted_bytes(case: Case, device: torch.device) -> float:
    """What a plan at stage 3 says that its tensors need, from a profile that is measured now."""
    plan = plan_of(case, 3)
    _release_memory(device)
    profile = poplar.profile_cluster(
        case.new_model(device),
        next_byte_loss,
        case.new_batch(2, device),
        stages=(3,),
        seconds=PREDICTION_SECONDS,
        max_batch=max(plan.micro_batches[0]),
        max_norm=MAX_NORM,
        compute_dtype=DTYPE,
        cache=False,
        progress=False,
        lr=LEARNING_RATE,
    )
    return poplar.predict(profile, plan).memory_bytes[0] - profile.devices[0].held_bytes


def _row(
    case: Case,
    way: str,
    measured: dict[str, Measured],
    compiler: str,
    device: torch.device,
    predicted: float | None,
) -> Row:
    own = measured[way]
    steps = sorted(1e3 * seconds for turn in own.seconds for seconds in turn)
    done = bool(steps) and not own.failed
    figures = {
        "ms": statistics.median(steps) if done else None,
        "p20_ms": steps[len(steps) // 5] if done else None,
        "p80_ms": steps[len(steps) * 4 // 5] if done else None,
        "GiB": _gib(own.allocated),
        # The peak of what the allocator holds, and what the plan says without what others hold.
        "GiB_reserved": _gib(own.reserved),
        "GiB_predicted": _gib(predicted) if way == MEMORY_OF[1] else None,
        # Time over that of plain autocast, and speed over that of FSDP2: medians over rounds.
        "over_plain": _ratio(own, measured.get(PLAIN)),
        "over_fsdp2": _ratio(measured.get(PEER), own),
        "loss": own.loss,
        "steps": len(steps),
        "rounds": len(own.seconds),
        "failed": own.failed,
    }
    return new_row(case, way, bool(compiler), device.type, figures)


def new_row(case: Case, way: str, is_compiled: bool, device: str, figures: dict[str, Any]) -> Row:
    """The row of one way."""
    model = case.new_model(torch.device("meta"))
    what = {
        "size": case.name,
        "compiled": is_compiled,
        "way": way,
        # Rows of the same run were measured in turns.
        "run": 1,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": case.batch,
        "passes": case.passes,
        "context": case.model.context,
    }
    return Row.of("gpu_step", what, figures, packages=("torch", "triton"), device=device)


def _ratio(above: Measured | None, below: Measured | None) -> float | None:
    """Time over time: the median over rounds of the turns' medians."""
    if above is None or below is None or above.failed or below.failed:
        return None
    turns = zip(above.seconds, below.seconds, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in turns)


def _gib(number: float | None) -> float | None:
    return None if number is None else number / GIB
