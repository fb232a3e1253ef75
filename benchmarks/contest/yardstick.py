"""What the ranks can do on their own: plain passes, matrix products, an empty loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from emulation import spin
from speed import Speed, measure_speeds
from torch.utils.flop_counter import FlopCounterMode

from contest.crew import Here
from contest.outcome import Calibration, MicroBatches
from contest.task import Task

LARGEST_BATCH = 64
"""Samples per second hardly change beyond it on a CPU."""
MATRIX = 512
SPIN_SECONDS = 0.5
TURN_SECONDS = 2.0
"""Of plain passes in each round."""


def calibrate(here: Here, task: Task, seconds: float) -> Calibration:
    """Measure all ranks at once. Collective; the same on every rank."""
    cap = here.place.cluster.cap(here.rank, task.global_batch)
    speeds = _plain_speeds(task, min(cap or LARGEST_BATCH, LARGEST_BATCH), seconds, search=True)
    dist.barrier()
    flops = matrix_flops(seconds / 4)
    dist.barrier()
    spins = spin(SPIN_SECONDS)
    others: list[tuple[float, float]] = [(0.0, 0.0)] * here.size
    dist.all_gather_object(others, (flops, spins))
    return Calibration(
        speeds=tuple(speed.samples_per_second for speed in speeds),
        batches=tuple(speed.batch for speed in speeds),
        rank_flops=tuple(own for own, _ in others),
        spins=tuple(own for _, own in others),
    )


def take_turn(here: Here, task: Task, batches: Sequence[int]) -> tuple[float, ...]:
    """Samples per second of plain passes, by rank, at batches that are known to be the best.

    Collective; the same on every rank.
    """
    speeds = _plain_speeds(task, batches[here.rank], TURN_SECONDS, search=False)
    return tuple(speed.samples_per_second for speed in speeds)


def steps_of_turn(split: MicroBatches, speeds: Sequence[float]) -> int:
    """How many steps of a split make a turn."""
    each = max(sum(sizes) / speed for sizes, speed in zip(split, speeds, strict=True))
    return max(2, round(TURN_SECONDS / each))


def in_step(here: Here, task: Task, split: MicroBatches, steps: int) -> tuple[float, ...]:
    """Seconds in which all ranks are done with a split, in plain passes, step after step.

    There is nothing between two steps but waiting. Who is done waits, and leaves to the others what
    ranks share: a core, a cache, a clock. So even ranks need less than the slowest one's speed
    among busy ones would say; well balanced ones need more than the sum of speeds would, since no
    pass takes as long as the last, and samples are whole. Collective.
    """
    sizes = [size for size in split[here.rank] if size]
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
    """fp32 operations per second in products of matrices that fit the cache."""
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    products, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(left, right)
        products += 1
    return products * 2 * MATRIX**3 / (time.perf_counter() - start)


def flops_per_sample(task: Task, samples: int = 2) -> float:
    """Of a forward and backward of plain PyTorch, as torch's own counter counts them."""
    model = task.new_model()
    with FlopCounterMode(display=False) as counter:
        task.loss_fn(model, task.example(samples)).backward()
    return counter.get_total_flops() / samples
