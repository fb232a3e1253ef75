"""Memory of this process: what it holds, its peak, and a limit that the kernel enforces.

[Note: enforced limits]
`RLIMIT_DATA` limits private writable memory: what malloc and torch allocate, and stacks of threads.
Memory that is shared between processes does not count, so all engines communicate by gloo, whose
buffers are private. Freed memory must return to the system at once (`MALLOC`), else a limit would
depend on what glibc keeps. The limit is set above a baseline, which is read after a model of two
blocks has been trained with the same engine: by then modules are imported, ranks connected, threads
started and the buffers of matrix products allocated. Stacks of threads that start later count, so
they are small (`THREAD_STACK_BYTES`).

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
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(64 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024),
    "MALLOC_ARENA_MAX": "1",
    "POPLAR_MEMORY_CACHE": "off",
}
"""Environment variables with which glibc and Poplar return freed memory to the system."""
_M_PERTURB = -6
THREAD_STACK_BYTES = 2 << 20
"""Instead of 8 MiB."""
_STATUS = Path("/proc/self/status")


def prepare_rank_processes() -> None:
    """Set what the C library reads when a process starts. Call it before the first `Workers`."""
    os.environ.update(MALLOC)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (THREAD_STACK_BYTES, hard))


def private_bytes() -> int:
    """Private writable memory, resident or not: what `RLIMIT_DATA` counts."""
    return _status("VmData")


def resident_bytes() -> int:
    """Resident memory, without mapped files. See [Note: mapped files]."""
    return _status("VmRSS") - _status("RssFile")


def peak_resident_bytes() -> int:
    """Largest resident memory since `reset_peak`, without the files that are mapped now."""
    return _status("VmHWM") - _status("RssFile")


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


def release_freed_memory() -> None:
    """Collect garbage and return freed memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def limited_to(nbytes: int) -> Iterator[None]:
    """Allow this process so much private memory more than it has; beyond it allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {name}")
