"""Properties of one CUDA device from NVML: memory use, links, clocks and throttling.

NVML is optional. It may be missing, of another version, or forbidden in a container. So
nothing here raises: a missing property is None or empty, as all of them are if NVML is unusable.
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
    0x80: "power brake (the power supply requests less)",
}
"""Temporary reasons: a curve that is measured under them is not valid later."""

_SETTINGS = {
    0x02: "application clocks are set",
    0x04: "power cap",
    0x10: "sync boost",
    0x100: "display clocks are set",
}
"""Permanent reasons: they also apply in training, so they are part of the measurement."""

_MOST_LINKS = 18
"""Most NVLinks of one device (H100, H200, B200)."""


@dataclass(frozen=True)
class NvmlDevice:
    """One device, or one MIG slice of a device."""

    library: ModuleType | None = None
    handle: Any = None
    whole: Any = None
    """The physical device of a slice, else `handle` itself."""
    problem: str = ""
    """Why NVML cannot be used; then nothing is known of the device."""

    @property
    def uuid(self) -> str | None:
        return _text(self._ask("nvmlDeviceGetUUID", self.handle))

    @property
    def driver(self) -> str | None:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def own_bytes(self) -> int | None:
        """Device memory of this process, its CUDA context included."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", self.handle) or []
        held = {process.pid: process.usedGpuMemory for process in processes}
        if os.getpid() in held:
            used = held[os.getpid()]
        elif len(held) == 1:
            # In a container NVML reports process ids of the host. This process has a context.
            used = next(iter(held.values()))
        else:
            return None
        return None if used is None else int(used)

    def slowdowns(self) -> tuple[str, ...]:
        """Temporary reasons why the device runs below its clock rate."""
        return self._reasons(_SLOWDOWNS)

    def clock_settings(self) -> tuple[str, ...]:
        """Permanent reasons why the device runs below its clock rate."""
        return self._reasons(_SETTINGS)

    def other_processes(self) -> tuple[str, ...]:
        """That other programs compute on the device, if they do."""
        others = len(self._ask("nvmlDeviceGetComputeRunningProcesses", self.handle) or []) - 1
        return (f"{others} other process(es) compute on it",) if others > 0 else ()

    def links(self) -> tuple[str, ...]:
        """Links of the device, such as "NVLink 4 x18", "PCIe 4 x8 (of x16)"."""
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
        # An idle device lowers its generation but not its width: query the maximum generation.
        generation = self._ask("nvmlDeviceGetMaxPcieLinkGeneration", self.whole)
        width = self._ask("nvmlDeviceGetCurrPcieLinkWidth", self.whole)
        widest = self._ask("nvmlDeviceGetMaxPcieLinkWidth", self.whole)
        if generation is None or width is None:
            return ()
        narrowed = f" (of x{widest})" if widest is not None and width < widest else ""
        return (f"PCIe {generation} x{width}{narrowed}",)

    def _reasons(self, known: dict[int, str]) -> tuple[str, ...]:
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons", self.whole)
        if mask is None:  # drivers before 535 have only the old name
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.whole)
        return tuple(text for bit, text in known.items() if (mask or 0) & bit)

    def _ask(self, function: str, *args: Any) -> Any:
        """The result, or None if the function is not supported, not allowed, or unknown."""
        try:
            return getattr(self.library, function)(*args)
        except Exception:
            return None


def find(index: int, uuid: str) -> NvmlDevice:
    """The device `cuda:<index>` of this process.

    Args:
        index: of CUDA. NVML numbers devices without `CUDA_VISIBLE_DEVICES`, in another order.
        uuid: from CUDA, without the prefix "GPU-" or "MIG-".
    """
    library = _library()
    if isinstance(library, str):
        return NvmlDevice(problem=library)
    names = [f"GPU-{uuid}", f"MIG-{uuid}"]
    # CUDA may report the UUID of the device for a slice; the environment variable has the slice.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[index:]
    if visible and visible[0].strip().startswith("MIG-"):
        names.insert(0, visible[0].strip())
    any_device = NvmlDevice(library)
    for name in names:
        handle = any_device._ask("nvmlDeviceGetHandleByUUID", name)
        if handle is not None:
            whole = any_device._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            return NvmlDevice(library, handle, handle if whole is None else whole)
    return NvmlDevice(problem=f"NVML does not know cuda:{index} (uuid {uuid})")


def _library() -> ModuleType | str:
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed; pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()  # NVML counts calls, so later ones are cheap
    except Exception as error:  # a broken driver library must not stop training
        return f"NVML does not start: {error}"
    return pynvml  # type: ignore[no-any-return]


def _text(answer: Any) -> str | None:
    return answer.decode() if isinstance(answer, bytes) else answer
