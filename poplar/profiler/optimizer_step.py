"""Times the optimizer step on this rank and counts the bytes of its state per element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from poplar.profiler.timing import seconds_of
from poplar.zero.update import OptimizerFactory

MOST_ELEMENTS = 1 << 26
"""Elements that are stepped at most. The time of larger models is extrapolated."""
SMALL_PART = 1 / 8
"""Size of the second measurement, which separates latency from time per element."""
_SHORTEST_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """One optimizer step over the whole model's state."""

    seconds: float
    latency_seconds: float
    """Time of a step over the smallest share."""
    state_bytes: float
    """Bytes of optimizer state per element, without an fp32 master."""


def measure_update(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    numels: Sequence[int],
    device: torch.device,
) -> UpdateCost:
    """Step flat fp32 buffers of two sizes, as the engine does; fit a line to both times.

    Args:
        factory: the user's optimizer class.
        options: its keyword arguments.
        numels: elements of each flat buffer.
        device: of this rank.

    Raises:
        torch.OutOfMemoryError: even a few elements do not fit.
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
    optimizer.step()  # allocates the state
    first = seconds_of(optimizer.step, device)
    repeats = max(1, math.ceil(_SHORTEST_SECONDS / max(first, 1e-6)))
    seconds = median(seconds_of(optimizer.step, device, repeats) for _ in range(3))
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return seconds, held / sum(numels)
