"""Wall time of work on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from poplar.system.devices import synchronize

SHORTEST_SAMPLE_SECONDS = 0.1
"""Shorter work is timed several times at once: a CPU quota is enforced every 10 to 100 ms."""
SHORTEST_SECONDS = 1e-9
"""What work takes at least: a coarse clock may not advance meanwhile, and profiles refuse 0."""


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds until the device has finished `run`: the mean over `repeats` without a pause."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return max(time.perf_counter() - began, SHORTEST_SECONDS) / repeats


def repeats_in_a_sample(seconds: float) -> int:
    """How often work that takes so many seconds is repeated in one sample."""
    return max(1, math.ceil(SHORTEST_SAMPLE_SECONDS / max(seconds, 1e-6)))


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of three samples of half the usual length, after a run that is not timed."""
    run()
    repeats = repeats_in_a_sample(2.0 * seconds_of(run, device))
    return median(seconds_of(run, device, repeats) for _ in range(3))
