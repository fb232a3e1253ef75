"""The optimizer step on this rank: how long, and how many bytes of state an element costs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from poplar.zero.update import OptimizerFactory

MOST_ELEMENTS = 1 << 26
"""Of larger models a part is stepped; the rest follows by proportion."""
SMALL_PART = 1 / 8
_SHORTEST_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """One optimizer step over the whole model's state."""

    seconds: float
    latency_seconds: float
    """What remains of it for the smallest share."""
    state_bytes: float
    """Per element, without master values."""


def measure_update(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    numels: Sequence[int],
    device: torch.device,
) -> UpdateCost:
    """Step flat fp32 buffers as the engine does, large and small; a straight line through both.

    Args:
        factory: the user's optimizer class.
        options: its keyword arguments.
        numels: elements of each flat buffer.
        device: of this rank.
    """
    whole = sum(numels)
    part = min(1.0, MOST_ELEMENTS / whole)
    while True:
        try:
            large, state_bytes = _step(factory, options, _parts(numels, part), device)
            small, _ = _step(factory, options, _parts(numels, part * SMALL_PART), device)
            break
        except torch.OutOfMemoryError:
            if part * whole < 1 << 16:
                raise
            part /= 2
    slope = max(0.0, large - small) / (part * (1 - SMALL_PART))
    latency = max(0.0, large - slope * part)
    return UpdateCost(seconds=latency + slope, latency_seconds=latency, state_bytes=state_bytes)


def _parts(numels: Sequence[int], part: float) -> list[int]:
    return [max(1, round(numel * part)) for numel in numels]


def _step(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    numels: Sequence[int],
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of a step over buffers of these sizes, and bytes of state per element."""
    values = [torch.zeros(numel, device=device) for numel in numels]
    for value in values:
        value.grad = torch.zeros_like(value)
    optimizer = factory([{"params": values}], **options)
    optimizer.step()  # makes the state
    first = _timed(optimizer, device, 1)
    repeats = max(1, math.ceil(_SHORTEST_SECONDS / max(first, 1e-6)))
    seconds = median(_timed(optimizer, device, repeats) for _ in range(3))
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return seconds, held / sum(numels)


def _timed(optimizer: torch.optim.Optimizer, device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats
