"""Limits of this process's memory that the kernel enforces, as users set them with `ulimit -d`.

`RLIMIT_DATA` limits private writable memory: what malloc and torch allocate, and the stacks of
threads. Memory that is shared between processes does not count.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from process_memory import private_bytes, reset_peak

__all__ = [
    "limit_to",
    "peak_resident_bytes",
    "private_bytes",
    "reset_peak",
    "resident_bytes",
    "return_freed_memory",
]

THREAD_STACK_BYTES = 1 << 20
"""Instead of 8 MiB, which count although a thread touches little of them."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_STATUS = Path("/proc/self/status")


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system at once, and give new threads small stacks.

    As `MALLOC_MMAP_THRESHOLD_=65536 MALLOC_ARENA_MAX=1` and `ulimit -s 1024` before the start.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(_M_ARENA_MAX, 1)
    attributes = ctypes.create_string_buffer(64)  # pthread_attr_t
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(THREAD_STACK_BYTES))
    libc.pthread_setattr_default_np(attributes)


def limit_to(nbytes: int) -> None:
    """Allow this process so many more bytes of private memory than it has."""
    limit = private_bytes() + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def resident_bytes() -> int:
    """Resident memory, with shared pages and mapped files."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident memory since `reset_peak`, with shared pages and mapped files."""
    return _status("VmHWM")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
