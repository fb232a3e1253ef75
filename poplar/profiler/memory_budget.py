"""How much memory this rank may use."""

from __future__ import annotations

from typing import NamedTuple

import torch

from poplar.profiler.memory import model_bytes
from poplar.profiler.session import Session
from poplar.system import devices, host_limits
from poplar.values.formatting import format_bytes

MEMORY_RESERVE = 0.05
"""Part of a rank's memory that plans leave free."""


class MemoryBudget(NamedTuple):
    """Bytes of one rank."""

    memory_bytes: int
    """What the rank may use."""
    held_bytes: int
    """What of it is held by other things than the model and its passes, such as a CUDA context,
    loaded kernels, NCCL buffers, and other tensors of this process."""

    @property
    def activation_bytes(self) -> float:
        """What activations may take."""
        return self.memory_bytes * (1 - MEMORY_RESERVE) - self.held_bytes

    def tightened(self, later: MemoryBudget) -> MemoryBudget:
        """With what is held after kernels were loaded and collectives have run."""
        return MemoryBudget(
            min(self.memory_bytes, later.memory_bytes), max(self.held_bytes, later.held_bytes)
        )


def memory_budget(session: Session) -> MemoryBudget:
    """The budget of this rank at the moment; all ranks of a host should ask at the same time.

    On CUDA, memory in the cache of torch's allocator counts as free: call it after
    `torch.cuda.empty_cache()` on all ranks, because other processes cannot use what is cached.

    Raises:
        ValueError: the `memory_limit` of this rank is larger than its memory.
    """
    device, limit = session.device, session.memory_limit
    held, total = 0, _smallest(host_limits.total_memory(), host_limits.process_limit())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = total - free - devices.describe(device).others_bytes
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        held = own - cached - model_bytes(session.job.model)
    elif limit is None:
        parameters = session.job.model.parameters()
        weights = sum(p.numel() * p.element_size() for p in parameters if not p.is_meta)
        held = host_limits.resident_memory() - weights
    if limit is not None and total is not None and limit > total:
        raise ValueError(
            f"rank {session.group.rank}: a memory_limit of {format_bytes(limit)}, but {device} has "
            f"{format_bytes(total)}; lower it, or leave it out to use what is free"
        )
    available = limit or devices.memory_available(device, session.ranks_on_this_host)
    return MemoryBudget(available, max(0, held))


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
