"""What is known of a device before anything is measured on it: its name, its memory, its limits.

The operating system and NVML tell; nothing here is a timing but `measure_flops`. All of it is about
this rank's own device: every rank asks for itself.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from poplar.system import host_limits, nvml

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One rank's device, in words and bytes."""

    name: str
    """What a person calls it: "NVIDIA GeForce RTX 4090"."""
    kind: str
    """`"cpu"` or `"cuda"`."""
    host: str
    cores: int
    """Cores that this process may run on, or multiprocessors."""
    total_bytes: int
    """Memory of the device; of the host or container for a CPU."""
    others_bytes: int
    """What of it is held by others than this process."""
    uuid: str = ""
    """Of a CUDA device or slice of one; empty for a CPU."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability: (8, 0) and up really has bf16."""
    driver: str = ""
    links: tuple[str, ...] = ()
    """Fastest first: "NVLink 4 x18", "PCIe 5 x16"."""
    clocks_mhz: tuple[int, int] | None = None
    """Now, and at most."""
    throttled: str = ""
    """Why it runs below its clocks for now; empty if it does not."""
    notes: tuple[str, ...] = ()
    """What limits the device for good, or what could not be found out, and why."""

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 itself: emulation, as on capability 7, does not count."""
        return self.capability is None or self.capability >= (8, 0)

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self)


def describe(device: torch.device) -> DeviceInfo:
    """What is known of `device`. Makes a CUDA context on it if there is none.

    Raises:
        ValueError: a device that is neither a CPU nor a CUDA device.
    """
    return _describe_cuda(device) if checked_kind(device) == "cuda" else _describe_cpu()


def throttle_reason(device: torch.device) -> str:
    """Why the device runs below its clocks at this moment; empty if it does not or nobody knows.

    Heat and the power brake, which pass. A power cap or clocks that somebody has set do not count:
    so the device will run when it trains, too.
    """
    if checked_kind(device) == "cpu":
        return ""
    known = _nvml(device)
    return "" if isinstance(known, str) else "; ".join(known.slowdowns())


def memory_available(device: torch.device, ranks_on_host: int) -> int:
    """Bytes that this rank may use, what it holds already included.

    Args:
        device: this rank's.
        ranks_on_host: how many ranks share the host. They share the memory that is free evenly, and
            each keeps what it holds: so every rank of the host should ask at the same moment.

    Returns:
        A CPU's: the rank's part of what is free, within the limits of the container, and what the
        process holds. A CUDA device's: all of it, less what others hold.

    Raises:
        ValueError: no ranks, another kind of device.
        RuntimeError: the system does not say how much memory it has.
    """
    if ranks_on_host < 1:
        raise ValueError(f"ranks_on_host must be at least 1, got {ranks_on_host}")
    if checked_kind(device) == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - _held_by_others(device, free, total, _nvml(device))
    free_bytes = host_limits.free_memory()
    if free_bytes is None:
        raise RuntimeError(
            "this system does not say how much memory is free (no MemAvailable in /proc/meminfo); "
            "pass memory_limit= in bytes"
        )
    return free_bytes // ranks_on_host + host_limits.resident_memory()


def _describe_cpu() -> DeviceInfo:
    total, free, quota = (
        host_limits.total_memory(),
        host_limits.free_memory(),
        host_limits.processor_quota(),
    )
    notes = [] if quota is None else [f"may use {quota:.3g} cores' worth of time (CPU quota)"]
    if total is None or free is None:
        notes.append("the system does not say how much memory it has")
    return DeviceInfo(
        name=host_limits.processor_name(),
        kind="cpu",
        host=platform.node(),
        cores=host_limits.cores(),
        total_bytes=total or 0,
        others_bytes=max(0, (total or 0) - (free or 0) - host_limits.resident_memory()),
        notes=tuple(notes),
    )


def _describe_cuda(device: torch.device) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    known = _nvml(device)
    info = DeviceInfo(
        name=properties.name,
        kind="cuda",
        host=platform.node(),
        cores=properties.multi_processor_count,
        total_bytes=total,
        others_bytes=_held_by_others(device, free, total, known),
        uuid=_uuid(device),
        capability=(properties.major, properties.minor),
        driver=_driver_on_disk(),
    )
    if isinstance(known, str):
        return replace(info, notes=(known,))
    return replace(
        info,
        uuid=known.uuid or info.uuid,
        driver=known.driver or info.driver,
        links=known.links(),
        clocks_mhz=known.clocks_mhz,
        throttled="; ".join(known.slowdowns()),
        notes=known.clock_settings(),
    )


def _held_by_others(
    device: torch.device, free: int, total: int, known: nvml.NvmlDevice | str
) -> int:
    """Bytes of the device that are neither free nor this process's own.

    Where NVML does not tell what this process holds, its CUDA context counts as somebody else's.
    """
    own = None if isinstance(known, str) else known.own_bytes()
    if own is None:
        own = torch.cuda.memory_reserved(device)
    return max(0, total - free - own)


def _nvml(device: torch.device) -> nvml.NvmlDevice | str:
    properties = torch.cuda.get_device_properties(device)
    return nvml.find(_index(device), uuid=_uuid(device), bus=_bus(properties))


def _bus(properties: Any) -> str:
    """The device's place on the PCI bus; "" where this torch does not say."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return (
        f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def _uuid(device: torch.device) -> str:
    bare = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return f"GPU-{bare}" if bare and not bare.startswith(("GPU-", "MIG-")) else bare


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _driver_on_disk() -> str:
    """The kernel module's version, which says the driver's where NVML is missing."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "")


def synchronize(device: torch.device) -> None:
    """Wait for all work that was issued to `device`; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def checked_kind(device: torch.device) -> str:
    """`"cpu"` or `"cuda"`.

    Raises:
        ValueError: any other kind of device.
    """
    if device.type not in _KINDS:
        rank = os.environ.get("RANK", "0")
        raise ValueError(f"rank {rank}: Poplar trains on CPUs and CUDA devices, not on {device}")
    return device.type
