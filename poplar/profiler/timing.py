"""Wall time of work on a device, and the peak FLOP/s of the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from poplar.hardware.gpu_specifications import specification
from poplar.system.devices import checked_kind, synchronize

SHORTEST_SAMPLE_SECONDS = 0.1
"""Shorter work is timed several times at once: a CPU quota is enforced every 10 to 100 ms."""
SHORTEST_SECONDS = 1e-9
"""What work takes at least: a coarse clock may not advance meanwhile, and profiles refuse 0."""

_HALF = (torch.float16, torch.bfloat16)
_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
"""Large enough for a product to be bound by arithmetic, not by memory or launches."""


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
    return medians_in_turns([run], device)[0]


def medians_in_turns(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """`median_seconds` of each, sampled in turns: a disturbance of a turn affects no median."""
    repeats = []
    for run in runs:
        run()
        repeats.append(repeats_in_a_sample(2.0 * seconds_of(run, device)))
    both = list(zip(runs, repeats, strict=True))
    turns = [[seconds_of(run, device, often) for run, often in both] for _ in range(3)]
    return [median(samples) for samples in zip(*turns, strict=True)]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of matrix products in `dtype`; None if the device cannot multiply `dtype`.

    From the specification for fp16 and bf16 on known GPUs, else measured in under a second.
    """
    if checked_kind(device) == "cuda" and dtype in _HALF:
        printed = specification(torch.cuda.get_device_name(device))
        if printed is not None and (printed.bf16 or dtype != torch.bfloat16):
            return printed.half_flops
    try:
        return measure_flops(device, dtype)
    except (RuntimeError, TypeError):
        return None


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product. Does not change random state.

    Raises:
        RuntimeError: this device cannot multiply `dtype`, or has no memory for it.
    """
    side = _MATRIX_SIDE[checked_kind(device)]
    generator = torch.Generator(device).manual_seed(0)
    # Random values: products of constants draw less power and run at higher clocks.
    matrix = torch.randn(side, side, generator=generator, device=device).to(dtype)
    out = torch.empty_like(matrix)
    return 2 * side**3 / median_seconds(lambda: torch.mm(matrix, matrix, out=out), device)
