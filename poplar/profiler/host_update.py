"""Times the update of optimizer state that is in host memory, and measures how much fits there."""

from __future__ import annotations

from typing import Any

import torch

from poplar.profiler.model_profile import flat_numels
from poplar.profiler.optimizer_step import FEWEST_ELEMENTS, MOST_BYTES_EACH
from poplar.profiler.session import Session
from poplar.profiler.timing import median_seconds
from poplar.system import host_limits
from poplar.zero.streams import HostCopies, streams_of

MOST_ELEMENTS = 1 << 24
"""Elements that are updated at most, more than caches hold. For more, time is extrapolated."""
MEMORY_PART = 0.8
"""Of the host's free memory that plans may use; the rest is for loaders and frameworks."""


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
    return int(MEMORY_PART * (host_limits.free_memory() or 0) / ranks)


def host_update_seconds(session: Session) -> float:
    """Seconds of an update of the whole model in host memory, with the copies to and from it."""
    total = sum(flat_numels(session))
    fitting = session.memory.spare(session.group.rank) / MOST_BYTES_EACH
    numel = round(min(total, MOST_ELEMENTS, max(FEWEST_ELEMENTS, fitting)))
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
