"""Times what this rank does with each element of the model beside passes and collectives: the
optimizer step, on the device and in host memory, and packing and adding gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poplar.comm import Codec, Encoded
from poplar.profiler.model_profile import flat_numels
from poplar.profiler.session import Session
from poplar.profiler.timing import median_seconds, medians_in_turns
from poplar.system import host_limits
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory
from poplar.values.communication import BITS
from poplar.zero.optimizers.state_values import taken_apart
from poplar.zero.streams import HostCopies, streams_of

MOST_STEPPED = 1 << 26
"""Elements that are stepped at most. The time of larger models is extrapolated."""
MOST_ON_HOST = 1 << 24
"""Elements that are updated in host memory at most, more than caches hold."""
MOST_PACKED = 1 << 22
"""Elements that are packed and added at most, more than caches hold."""
FEWEST_ELEMENTS = 1 << 16
"""If fewer do not fit, the measurement fails."""
_BYTES_EACH = 24
"""Bytes per element that each of these is assumed to need. A step: value, gradient, state and
temporaries. Packing: a gradient, two copies and their sum."""
HOST_MEMORY_PART = 0.8
"""Of the host's free memory that plans may use; the rest is for loaders and frameworks."""
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
    part = min(1.0, _fitting(session, MOST_STEPPED, _BYTES_EACH * (1.0 + SMALL_PART)) / total)
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


def _fitting(session: Session, most: int, bytes_each: float = _BYTES_EACH) -> int:
    """Elements to measure with: as many as this rank has memory for, within the limits."""
    fitting = session.memory.spare(session.group.rank) / bytes_each
    return int(min(most, max(FEWEST_ELEMENTS, fitting)))


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


def measure_host_update(session: Session) -> dict[str, Any]:
    """Time the update of state in host memory; all ranks of a host should do so at the same time.

    Returns:
        `DeviceProfile.host_optimizer_seconds` and `host_memory_bytes`; nothing if this rank's
        memory is the host's, or if the class has no update there or needs blocks or whole tensors.
    """
    host = torch.device("cpu")
    cls = session.setup.classes[0]
    if session.device == host or cls.granularity != "elements" or cls.problem_on(host):
        return {}
    return {
        "host_memory_bytes": host_memory(session.ranks_on_this_host),
        "host_optimizer_seconds": host_update_seconds(session),
    }


def host_memory(ranks: int) -> int:
    """Bytes of host memory for the optimizer state of each of so many ranks of this host, now."""
    return int(HOST_MEMORY_PART * (host_limits.free_memory() or 0) / ranks)


def host_update_seconds(session: Session) -> float:
    """Seconds of an update of the whole model in host memory, with the copies to and from it."""
    total = sum(flat_numels(session))
    numel = min(total, _fitting(session, MOST_ON_HOST))
    streams = streams_of(session.device, waits_on_stream=True)
    gradient = torch.zeros(numel, dtype=torch.float32, device=session.device)
    shard = gradient.to(session.compute_dtype, copy=True)
    values = torch.zeros(numel, dtype=torch.float32, device="cpu")
    cls = session.setup.classes[0]
    optimizer = cls.shard_factory([{"params": [values]}], **cls.options)

    def step() -> None:
        copies = HostCopies([gradient, shard], streams, session.group, "an update on the host")
        values.grad, rounded = copies.wait()
        optimizer.step()
        rounded.copy_(values)
        shard.copy_(rounded, non_blocking=True)

    return median_seconds(step, session.device) * total / numel


def measure_codec(session: Session) -> dict[str, Any]:
    """Time each precision; all ranks of a host should do so at the same time.

    Returns:
        `DeviceProfile.encode_seconds` and `decode_seconds`; nothing if there is one rank only.
    """
    if session.group.size == 1:
        return {}
    numel = _fitting(session, MOST_PACKED) // 64 * 64
    device = session.device
    gradient = torch.linspace(-1.0, 1.0, numel, device=device).to(session.compute_dtype)
    out = torch.empty(numel, dtype=torch.float32, device=device)

    runs: list[Callable[[], object]] = []
    for bits in BITS.values():
        codec = Encoded(bits=bits) if bits else Codec(session.job.reduce_dtype)
        packed = torch.empty(codec.wire_numel(numel), dtype=codec.wire_dtype, device=device)
        pack = partial(codec.pack, packed, [gradient], [0], 1.0, False)
        add = partial(codec.reduce, out, [packed, packed], False)
        runs += [pack, add]
    seconds = medians_in_turns(runs, device)
    return {
        "encode_seconds": tuple(each / numel for each in seconds[::2]),
        "decode_seconds": tuple(each / (2 * numel) for each in seconds[1::2]),
    }
