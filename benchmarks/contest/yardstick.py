"""What the ranks can do on their own: plain passes, matrix products, an empty loop."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from emulation import spin
from speed import measure_speeds
from torch.utils.flop_counter import FlopCounterMode

from contest.crew import Here
from contest.outcome import Calibration
from contest.task import Task

LARGEST_BATCH = 64
"""Samples per second hardly change beyond it on a CPU."""
MATRIX = 512
SPIN_SECONDS = 0.5


def calibrate(here: Here, task: Task, seconds: float) -> Calibration:
    """Measure all ranks at once. Collective; the same on every rank."""
    cap = here.place.cluster.cap(here.rank, task.global_batch)
    data = task.example(LARGEST_BATCH)
    speeds = measure_speeds(
        task.new_model(),
        task.loss_fn,
        lambda samples: {name: tensor[:samples] for name, tensor in data.items()},
        max_batch=min(cap or LARGEST_BATCH, LARGEST_BATCH),
        seconds=seconds,
    )
    dist.barrier()
    flops = matrix_flops(seconds / 4)
    dist.barrier()
    spins = spin(SPIN_SECONDS)
    others: list[tuple[float, float]] = [(0.0, 0.0)] * here.size
    dist.all_gather_object(others, (flops, spins))
    return Calibration(
        speeds=tuple(speed.samples_per_second for speed in speeds),
        rank_flops=tuple(own for own, _ in others),
        spins=tuple(own for _, own in others),
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
