"""Times the optimizer step on this rank and counts the bytes of its state per element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poplar.profiler.model_profile import flat_numels
from poplar.profiler.session import Session
from poplar.profiler.timing import medians_in_turns
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory
from poplar.zero.optimizers.state_values import taken_apart

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
    """Step fp32 tensors of two sizes in turns, as the engine does; fit a line to both times.

    The line goes through the time of the larger size. Its latency is at most the other time.

    Raises:
        torch.OutOfMemoryError, RuntimeError: even a few elements do not fit.
    """
    sizes = _shapes(session)
    total = sum(map(math.prod, sizes))
    bytes_each = MOST_BYTES_EACH * (1.0 + SMALL_PART)
    fitting = session.memory.spare(session.group.rank) / bytes_each
    part = min(1.0, max(FEWEST_ELEMENTS, min(MOST_ELEMENTS, fitting)) / total)
    while True:
        try:
            large, small = _step_in_turns(session, sizes, (part, part * SMALL_PART))
            break
        except Exception as error:
            if not is_out_of_memory(error) or part * total < FEWEST_ELEMENTS:
                raise
            free_failed_pass(error)
            part /= 2
    slope = (large.seconds - small.seconds) / max(1, large.elements - small.elements)
    latency = max(0.0, large.seconds - slope * large.elements)
    latency = min(latency, small.seconds, large.seconds)
    slope = (large.seconds - latency) / large.elements
    return UpdateCost(
        seconds=latency + slope * total,
        latency_seconds=latency,
        state_bytes=large.state_bytes / large.elements,
    )


class _Measured(NamedTuple):
    seconds: float
    elements: int
    state_bytes: int


def _shapes(session: Session) -> list[Sequence[int]]:
    """The tensors of the update: flat buffers, or parameters whose class needs blocks or more."""
    if session.setup.classes[0].granularity == "elements":
        return [(numel,) for numel in flat_numels(session)]
    return [p.shape for p in session.job.model.parameters() if p.requires_grad]


def _step_in_turns(
    session: Session, shapes: Sequence[Sequence[int]], parts: Sequence[float]
) -> list[_Measured]:
    """Steps over these parts of the state. An error's frames hold all of its memory."""
    optimizers = [_optimizer(session, shapes, part) for part in parts]
    seconds = medians_in_turns([one.step for one in optimizers], session.device)
    return list(map(_measured, optimizers, seconds))


def _optimizer(
    session: Session, shapes: Sequence[Sequence[int]], part: float
) -> torch.optim.Optimizer:
    """The optimizer of this part of each flat buffer, or of the parameters."""
    cls = session.setup.classes[0]
    if cls.granularity == "elements":
        shapes = [(max(1, round(numel * part)),) for (numel,) in shapes]
    else:
        shapes = _spread(shapes, part)
    values = [
        torch.zeros(tuple(shape), dtype=torch.float32, device=session.device) for shape in shapes
    ]
    for value in values:
        value.grad = torch.zeros_like(value)
    return cls.shard_factory([{"params": values}], **cls.options)


def _measured(optimizer: torch.optim.Optimizer, seconds: float) -> _Measured:
    values = [value for group in optimizer.param_groups for value in group["params"]]
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in taken_apart(state).values()
        if isinstance(value, Tensor) and value.dim() > 0
    )
    return _Measured(seconds, sum(value.numel() for value in values), held)


def _spread(shapes: Sequence[Sequence[int]], part: float) -> list[Sequence[int]]:
    """Shapes from all places of the list with about this part of all elements; at least one."""
    chosen: list[Sequence[int]] = []
    wanted = have = 0.0
    for shape in shapes:
        wanted += part * math.prod(shape)
        if have + math.prod(shape) / 2 <= wanted:
            chosen.append(shape)
            have += math.prod(shape)
    return chosen or [min(shapes, key=math.prod)]
