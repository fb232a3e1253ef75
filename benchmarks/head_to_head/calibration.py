"""Speed of the ranks without an engine: plain passes, matrix products."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from head_to_head.outcome import Calibration, MicroBatches
from head_to_head.task import Task
from head_to_head.workers import WorkerContext
from poplar.pair.speed import Speed, measure_speeds

LARGEST_BATCH = 64
"""On a CPU, larger batches are hardly faster."""
MATRIX = 512
TURN_SECONDS = 2.0
"""Of plain passes in each round."""


def calibrate(context: WorkerContext, task: Task, seconds: float) -> Calibration:
    """Measure all ranks at once. Collective; the same on every rank."""
    cap = context.open_cluster.cluster.cap(context.rank, task.global_batch)
    speeds = _plain_speeds(task, min(cap or LARGEST_BATCH, LARGEST_BATCH), seconds, search=True)
    dist.barrier()
    flops = [0.0] * context.size
    dist.all_gather_object(flops, matrix_flops(seconds / 4))
    return Calibration(
        speeds=tuple(speed.samples_per_second for speed in speeds),
        batches=tuple(speed.batch for speed in speeds),
        rank_flops=tuple(flops),
    )


def take_turn(context: WorkerContext, task: Task, batches: Sequence[int]) -> tuple[float, ...]:
    """Samples per second of plain passes, by rank, at the calibrated batches.

    Collective; the same on every rank.
    """
    speeds = _plain_speeds(task, batches[context.rank], TURN_SECONDS, search=False)
    return tuple(speed.samples_per_second for speed in speeds)


def steps_of_turn(split: MicroBatches, speeds: Sequence[float]) -> int:
    """Number of steps of a split in one turn."""
    each = max(sum(sizes) / speed for sizes, speed in zip(split, speeds, strict=True))
    return max(2, round(TURN_SECONDS / each))


def in_step(
    context: WorkerContext, task: Task, split: MicroBatches, steps: int
) -> tuple[float, ...]:
    """Seconds of steps of plain passes with a barrier after each and nothing else. Collective.

    A rank that waits leaves shared resources (core, cache, clock frequency) to the others, so an
    even split takes less time than the slowest rank's calibrated speed predicts. A balanced split
    takes more time than the sum of speeds predicts, because passes vary and samples are whole.
    """
    sizes = [size for size in split[context.rank] if size]
    model, data = task.new_model(), {size: task.example(size) for size in {*sizes}}
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        for size in sizes:
            task.loss_fn(model, data[size]).backward()
            model.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds[1:])


def _plain_speeds(task: Task, max_batch: int, seconds: float, *, search: bool) -> tuple[Speed, ...]:
    data = task.example(max_batch)
    return measure_speeds(
        task.new_model(),
        task.loss_fn,
        lambda samples: {name: tensor[:samples] for name, tensor in data.items()},
        max_batch=max_batch,
        seconds=seconds,
        search=search,
    )


def matrix_flops(seconds: float) -> float:
    """fp32 operations per second in products of matrices that fit into the cache."""
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    products, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(left, right)
        products += 1
    return products * 2 * MATRIX**3 / (time.perf_counter() - start)


def flops_per_sample(task: Task, samples: int = 2) -> float:
    """FLOPs of forward and backward in plain PyTorch, by torch's FLOP counter."""
    model = task.new_model()
    with FlopCounterMode(display=False) as counter:
        task.loss_fn(model, task.example(samples)).backward()
    return counter.get_total_flops() / samples
