"""Memory of this process: what it holds and its peak.

[Note: mapped files]
The code of libraries is mapped from their files, shared by all processes, and resident from when it
first runs. A rank whose wait takes longer runs other code than its peers, which made it 2 to 3 MiB
larger. So mapped files do not count. They are subtracted as they are at the end of a measurement:
they only grow, and every step of it needs as much of other memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(64 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024),
    "MALLOC_ARENA_MAX": "1",
    "POPLAR_MEMORY_CACHE": "off",
}
"""Environment variables with which glibc and Poplar return freed memory to the system."""
_M_PERTURB, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -6, -1, -3
_STATUS = Path("/proc/self/status")


def prepare_rank_processes() -> None:
    """Set what the C library reads when a process starts. Call it before the first `Workers`."""
    os.environ.update(MALLOC)


def private_bytes() -> int:
    """Private writable memory, resident or not: what `RLIMIT_DATA` counts."""
    return status("VmData")


def resident_bytes() -> int:
    """Resident memory, without mapped files. See [Note: mapped files]."""
    return status("VmRSS") - status("RssFile")


def peak_resident_bytes() -> int:
    """Largest resident memory since `reset_peak`, without the files that are mapped now."""
    return status("VmHWM") - status("RssFile")


def reset_peak() -> None:
    """Begin a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


def write_to_allocated_memory() -> None:
    """Let glibc write to what it allocates, in this process.

    Then memory counts as resident at once, not when a message arrives in it. Allocations take
    longer.
    """
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_PERTURB, 165)


def return_freed_memory() -> None:
    """Let glibc return what is freed to the system at once, in this process."""
    with suppress(OSError, AttributeError):  # not glibc
        for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(setting, int(MALLOC["MALLOC_TRIM_THRESHOLD_"]))


def release_freed_memory() -> None:
    """Collect garbage and return freed memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def status(name: str) -> int:
    """Bytes of a line of `/proc/self/status`."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {name}")
