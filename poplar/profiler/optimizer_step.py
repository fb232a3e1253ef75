"""Times the optimizer step on this rank and counts the bytes of its state per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poplar.profiler.model_profile import flat_numels
from poplar.profiler.session import Session
from poplar.profiler.timing import median_seconds
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory

MOST_ELEMENTS = 1 << 26
"""Elements that are stepped at most. The time of larger models is extrapolated."""
FEWEST_ELEMENTS = 1 << 16
"""If fewer do not fit, the measurement fails."""
MOST_BYTES_EACH = 24
"""Bytes per element that a step is assumed to need: value, gradient, state and temporaries."""
SMALL_PART = 1 / 8
"""Size of the second measurement, which separates latency from time per element."""


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """One optimizer step over the whole model's state."""

    seconds: float
    latency_seconds: float
    """Time of a step over the smallest share."""
    state_bytes: float
    """Bytes of optimizer state per element, without an fp32 master."""


def measure_update(session: Session) -> UpdateCost:
    """Step flat fp32 buffers of two sizes, as the engine does; fit a line to both times.

    Raises:
        torch.OutOfMemoryError, RuntimeError: even a few elements do not fit.
    """
    numels = flat_numels(session)
    fitting = session.memory.spare(session.group.rank) / MOST_BYTES_EACH
    part = min(1.0, max(FEWEST_ELEMENTS, min(MOST_ELEMENTS, fitting)) / sum(numels))
    while True:
        try:
            large, state_bytes = _step(session, numels, part)
            small, _ = _step(session, numels, part * SMALL_PART)
            break
        except Exception as error:
            if not is_out_of_memory(error) or part * sum(numels) < FEWEST_ELEMENTS:
                raise
            free_failed_pass(error)
            part /= 2
    slope = max(0.0, large - small) / (part * (1 - SMALL_PART))
    latency = max(0.0, large - slope * part)
    return UpdateCost(seconds=latency + slope, latency_seconds=latency, state_bytes=state_bytes)


def _step(session: Session, numels: Sequence[int], part: float) -> tuple[float, float]:
    """Seconds of a step over a part of all buffers, and bytes of state per element."""
    sizes = [max(1, round(numel * part)) for numel in numels]
    values = [torch.zeros(size, dtype=torch.float32, device=session.device) for size in sizes]
    for value in values:
        value.grad = torch.zeros_like(value)
    optimizer = session.setup.shard_optimizer_class([{"params": values}], **session.setup.options)
    seconds = median_seconds(optimizer.step, session.device)
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return seconds, held / sum(sizes)
