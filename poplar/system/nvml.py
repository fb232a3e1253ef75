"""What NVML knows of one CUDA device: who uses its memory, how it is linked, what slows it down.

NVML is advice. It may be missing (no `nvidia-ml-py`, no driver library, another vendor), older or
newer than this file, or forbidden in a container. So nothing here raises: a question without an
answer is answered by None, and `find` says in words why there are no answers at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_SLOWDOWNS = {
    0x08: "hardware slowdown (temperature or power)",
    0x20: "too hot (software thermal slowdown)",
    0x40: "too hot (hardware thermal slowdown)",
    0x80: "power brake (the power supply asks for less)",
}
"""Reasons that pass: a curve measured under them is not the device's."""

_SETTINGS = {
    0x02: "application clocks are set",
    0x04: "power cap",
    0x10: "sync boost",
    0x100: "display clocks are set",
}
"""Reasons that are how the device always runs under load: part of what is to be measured."""

_MOST_LINKS = 18
"""NVLinks of one device, at most (H100, H200, B200)."""


@dataclass(frozen=True)
class NvmlDevice:
    """One device, or one slice (MIG) of a device, that NVML answers questions about."""

    library: ModuleType
    handle: Any
    whole: Any
    """The physical device: of a slice the device it was cut from, else `handle` itself."""

    @property
    def uuid(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetUUID", self.handle))

    @property
    def driver(self) -> str | None:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    @property
    def clocks_mhz(self) -> tuple[int, int] | None:
        """Of the multiprocessors: now, and at most."""
        kind = getattr(self.library, "NVML_CLOCK_SM", 1)
        now = self._ask("nvmlDeviceGetClockInfo", self.whole, kind)
        most = self._ask("nvmlDeviceGetMaxClockInfo", self.whole, kind)
        return None if now is None or most is None else (int(now), int(most))

    def own_bytes(self) -> int | None:
        """What this process holds of the device's memory, its CUDA context included."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", self.handle) or []
        held = {process.pid: process.usedGpuMemory for process in processes}
        if os.getpid() in held:
            used = held[os.getpid()]
        elif len(held) == 1:
            # In a container NVML tells the host's process ids; whoever asks has a context already.
            used = next(iter(held.values()))
        else:
            return None
        return None if used is None else int(used)

    def slowdowns(self) -> tuple[str, ...]:
        """Why the device runs below its clocks for now; empty if it does not."""
        return self._reasons(_SLOWDOWNS)

    def clock_settings(self) -> tuple[str, ...]:
        """What keeps the clocks where they are, and will go on doing so."""
        return self._reasons(_SETTINGS)

    def links(self) -> tuple[str, ...]:
        """How the device is connected: "NVLink 4 x18", "PCIe 4 x8 (of x16)"."""
        return (*self._nvlinks(), *self._pcie())

    def _nvlinks(self) -> tuple[str, ...]:
        active = [
            number
            for number in range(_MOST_LINKS)
            if self._ask("nvmlDeviceGetNvLinkState", self.whole, number)
        ]
        if not active:
            return ()
        version = self._ask("nvmlDeviceGetNvLinkVersion", self.whole, active[0])
        return (f"NVLink{'' if version is None else f' {version}'} x{len(active)}",)

    def _pcie(self) -> tuple[str, ...]:
        # An idle device lowers its generation, not its width: so the generation at most.
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", self.whole)
        width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", self.whole)
        widest = self._ask("nvmlDeviceGetMaxPcieLinkWidth", self.whole)
        if generation is None or width is None:
            return ()
        narrowed = f" (of x{widest})" if widest is not None and width < widest else ""
        return (f"PCIe {generation} x{width}{narrowed}",)

    def _reasons(self, known: dict[int, str]) -> tuple[str, ...]:
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self.whole)
        if mask is None:  # drivers before 535 have the old name only
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.whole)
        return tuple(words for bit, words in known.items() if (mask or 0) & bit)

    def _ask(self, question: str, *args: Any) -> Any:
        return _ask(self.library, question, *args)


def find(index: int, *, uuid: str = "", bus: str = "") -> NvmlDevice | str:
    """The device that CUDA calls `index` in this process, or why NVML has no answers.

    Args:
        index: as in `cuda:<index>`. Not NVML's own, which knows neither `CUDA_VISIBLE_DEVICES` nor
            CUDA's order.
        uuid: what CUDA calls the device, with or without "GPU-" or "MIG-" in front; "" if unknown.
        bus: its place on the PCI bus, as in "00000000:65:00.0"; "" if unknown.
    """
    library = _library()
    if isinstance(library, str):
        return library
    handle = _handle(library, index, uuid, bus)
    if handle is None:
        return f"NVML does not know cuda:{index} (uuid {uuid or 'unknown'})"
    whole = _ask(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    return NvmlDevice(library, handle, handle if whole is None else whole)


def _library() -> ModuleType | str:
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed; pip install 'poplar-zero[nvml]'"
    try:
        pynvml.nvmlInit()  # counted by NVML: cheap from the second time on
    except Exception as error:  # a driver library that is broken must not stop training
        return f"NVML does not start: {error}"
    return pynvml  # type: ignore[no-any-return]


def _handle(library: ModuleType, index: int, uuid: str, bus: str) -> Any:
    """By the surest name first; a bare index is right only where nothing hides or sorts devices."""
    entry = _visible_entry(index)
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    # CUDA may give a slice the uuid of its device: what the user chose says which slice it is.
    names = [entry] if entry.startswith("MIG-") else []
    if bare:
        names += [f"GPU-{bare}", f"MIG-{bare}"]
    for name in names:
        handle = _ask(library, "nvmlDeviceGetHandleByUUID", name)
        if handle is not None:
            return handle
    if bus:
        return _ask(library, "nvmlDeviceGetHandleByPciBusId", bus)
    if entry.startswith("GPU-"):
        return _ask(library, "nvmlDeviceGetHandleByUUID", entry)
    number = int(entry) if entry.isdigit() else index
    return _ask(library, "nvmlDeviceGetHandleByIndex", number)


def _visible_entry(index: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` says of `cuda:<index>`; "" if it says nothing."""
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return entries[index].strip() if index < len(entries) else ""


def _ask(library: ModuleType, question: str, *args: Any) -> Any:
    """The answer, or None: not supported here, not allowed, or not known to this version."""
    try:
        return getattr(library, question)(*args)
    except Exception:
        return None


def _text(answer: Any) -> str | None:
    return answer.decode() if isinstance(answer, bytes) else answer
