"""Name, memory and limits of this rank's device, from the operating system, CUDA and NVML."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from poplar.system import host_limits, nvml

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """Properties of one rank's device."""

    name: str
    """Product name, such as "NVIDIA GeForce RTX 4090"."""
    kind: str
    """`"cpu"` or `"cuda"`."""
    host: str
    cores: int
    """Cores that this process may run on, or multiprocessors."""
    total_bytes: int
    """Memory of the device; of the host or container for a CPU."""
    others_bytes: int
    """Memory that other processes hold."""
    uuid: str = ""
    """UUID of a CUDA device or MIG slice; empty for a CPU."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; bf16 is native from (8, 0)."""
    driver: str = ""
    links: tuple[str, ...] = ()
    """Fastest first: "NVLink 4 x18", "PCIe 5 x16"."""
    throttled: str = ""
    """Why the device runs below its clock rate at the moment; empty if it does not."""
    notes: tuple[str, ...] = ()
    """Permanent limits of the device, and properties that could not be read."""

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 is native. Emulation, as on capability 7, does not count."""
        return self.capability is None or self.capability >= (8, 0)


def describe(device: torch.device) -> DeviceInfo:
    """Read the properties of `device`. Creates a CUDA context on it if there is none.

    Raises:
        ValueError: another type of device.
    """
    return _describe_cuda(device) if checked_kind(device) == "cuda" else _describe_cpu()


def throttle_reason(device: torch.device) -> str:
    """Why the device runs below its clock rate at this moment; empty if it does not or if unknown.

    Only temporary reasons count, such as heat. A power cap or fixed clocks also hold in training.
    """
    if checked_kind(device) == "cpu":
        return ""
    return "; ".join(_nvml(device).slowdowns())


def slowdown_reasons(device: torch.device) -> str:
    """What may slow the device down at this moment, permanent limits too; empty if unknown."""
    if checked_kind(device) == "cpu":
        return _quota_note()
    known = _nvml(device)
    return "; ".join((*known.slowdowns(), *known.clock_settings(), *known.other_processes()))


def memory_available(device: torch.device, ranks: int) -> int:
    """Bytes that this rank may use, including what it holds already.

    Args:
        device: of this rank.
        ranks: number of ranks that share the memory: those of the host for a CPU, those on the same
            device for CUDA. Free memory is divided evenly, so all of them should call this at the
            same time; together they get no more than there is.

    Returns:
        The rank's part of the free memory, plus what the process holds. CPU: within the limits of
        containers and of this process.

    Raises:
        ValueError: `ranks` below 1, or another type of device.
        RuntimeError: the system does not report its free memory.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if checked_kind(device) == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = total - free - _held_by_others(device, free, total, _nvml(device))
        return free // ranks + own
    free_bytes = host_limits.free_memory()
    if free_bytes is None:
        raise RuntimeError(
            "this system does not report its free memory (no MemAvailable in /proc/meminfo); pass "
            "memory_limit= in bytes"
        )
    free_bytes //= ranks
    unused = host_limits.unused_process_memory()
    if unused is not None:
        free_bytes = min(free_bytes, unused)
    return free_bytes + host_limits.resident_memory()


def peer_access(device: torch.device) -> dict[str, bool]:
    """By UUID of each other CUDA device of this process: whether `device` can read its memory."""
    if checked_kind(device) == "cpu":
        return {}
    own = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != own)
    return {
        f"GPU-{_uuid(torch.device('cuda', other))}": torch.cuda.can_device_access_peer(own, other)
        for other in others
    }


def peak_memory(device: torch.device) -> int:
    """Most bytes of this process so far; 0 if unknown.

    CUDA: what torch's allocator has reserved. CPU: resident memory, with shared pages.
    """
    if checked_kind(device) == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return host_limits.peak_resident_memory()


def _describe_cpu() -> DeviceInfo:
    total, free = host_limits.total_memory(), host_limits.free_memory()
    notes = [note for note in [_quota_note()] if note]
    if total is None or free is None:
        notes.append("the system does not report its memory")
    return DeviceInfo(
        name=host_limits.processor_name(),
        kind="cpu",
        host=platform.node(),
        cores=host_limits.cores(),
        total_bytes=total or 0,
        others_bytes=max(0, (total or 0) - (free or 0) - host_limits.resident_memory()),
        notes=tuple(notes),
    )


def _quota_note() -> str:
    quota = host_limits.processor_quota()
    return "" if quota is None else f"limited to {quota:.3g} cores by a CPU quota"


def _describe_cuda(device: torch.device) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    known = _nvml(device)
    return DeviceInfo(
        name=properties.name,
        kind="cuda",
        host=platform.node(),
        cores=properties.multi_processor_count,
        total_bytes=total,
        others_bytes=_held_by_others(device, free, total, known),
        uuid=known.uuid or f"GPU-{_uuid(device)}",
        capability=(properties.major, properties.minor),
        driver=known.driver or _driver_on_disk(),
        links=known.links(),
        throttled="; ".join(known.slowdowns()),
        notes=(known.problem,) if known.problem else known.clock_settings(),
    )


def _held_by_others(device: torch.device, free: int, total: int, known: nvml.NvmlDevice) -> int:
    """Bytes of the device that are neither free nor held by this process.

    If NVML does not report what this process holds, its CUDA context counts as held by others.
    """
    own = known.own_bytes()
    if own is None:
        own = torch.cuda.memory_reserved(device)
    return max(0, total - free - own)


def _nvml(device: torch.device) -> nvml.NvmlDevice:
    index = torch.cuda.current_device() if device.index is None else device.index
    return nvml.find(index, _uuid(device))


def _uuid(device: torch.device) -> str:
    """The UUID that CUDA reports, without a prefix."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _driver_on_disk() -> str:
    """Driver version from the kernel module, for systems without NVML."""
    try:
        fields = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((text for text in fields if "." in text and text[0].isdigit()), "")


def synchronize(device: torch.device) -> None:
    """Wait for all work on a CUDA device; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def checked_kind(device: torch.device) -> str:
    """`"cpu"` or `"cuda"`.

    Raises:
        ValueError: any other type of device.
    """
    if device.type not in _KINDS:
        rank = os.environ.get("RANK", "0")
        raise ValueError(f"rank {rank}: Poplar trains on CPUs and CUDA devices, not on {device}")
    return device.type
