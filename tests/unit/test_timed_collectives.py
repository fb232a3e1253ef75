"""Timing of collectives, and the buffers that transports keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from poplar.comm.host_buffers import HostBuffers
from poplar.profiler.collectives import Collectives
from poplar.profiler.memory_budget import PassMemory

CPU = torch.device("cpu")


def session(group: Any, control: Any, device: torch.device = CPU) -> Any:
    """What collectives read from the session of a profiler."""
    job = SimpleNamespace(reduce_dtype=torch.float32)
    return SimpleNamespace(
        group=group,
        control=control,
        device=device,
        compute_dtype=torch.float32,
        job=job,
        memory=PassMemory.unlimited(group.size),
    )


def test_default_device_does_not_affect_timing() -> None:
    """`torch.set_default_device("cuda")` must not move tensors of the control channel."""
    group = SimpleNamespace(rank=0, size=2)
    control = SimpleNamespace(exchange=lambda own, what: lambda: [own, own])
    comm: Any = SimpleNamespace(group=group, trim=lambda: None)
    work: Any = SimpleNamespace(wait=lambda: 0.0)
    collectives = Collectives(session(group, control), comm, [64])
    torch.set_default_device("meta")  # reading a tensor on this device raises
    try:
        seconds = collectives.seconds(lambda own, layout: work, (0.5, 0.5), budget=0.0)
    finally:
        torch.set_default_device(None)
    assert seconds >= 0.0


def test_receive_buffers_are_cached_while_their_size_is_used() -> None:
    pool, size = HostBuffers(), (100, torch.float32, CPU)
    first = pool.take(*size)
    pool.put_back(first)
    assert pool.take(*size).data_ptr() == first.data_ptr()
    pool.put_back(first)
    pool.trim(caches_memory=True)
    assert pool.take(*size).data_ptr() == first.data_ptr(), "it was used since the last trim"
    pool.put_back(first)
    pool.trim(caches_memory=True)
    pool.trim(caches_memory=True)
    assert not pool._idle
    pool.put_back(pool.take(*size))
    pool.trim(caches_memory=False)
    assert not pool._idle
