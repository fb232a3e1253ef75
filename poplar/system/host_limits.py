"""Memory and cores of this host, and the limits of containers and of this process.

Reads only `/proc` and `/sys`. A value that the kernel does not report is None, never a guess.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")

# cgroup v1 reports "no limit" as the largest multiple of a page that fits into 63 bits.
_NO_LIMIT = 1 << 60


def processor_name() -> str:
    """The processor name that the kernel reports; "CPU" if there is none."""
    # x86 has "model name", some ARM kernels have only "Hardware" or neither.
    text = _read(_PROC / "cpuinfo") or ""
    found = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else "CPU"


def affinity() -> set[int]:
    """The cores that this process may run on, by number; empty if the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(affinity()) or os.cpu_count() or 1


def total_memory() -> int | None:
    """Memory of this host in bytes, or of the container if that has less."""
    installed = _bytes_in("meminfo", "MemTotal")
    limits = [limit for limit, _ in _memory_groups()]
    return min([*limits, *([] if installed is None else [installed])], default=None)


def free_memory() -> int | None:
    """Bytes that processes of this host or container can still allocate without swapping."""
    unused = [max(0, limit - used) for limit, used in _memory_groups()]
    available = _bytes_in("meminfo", "MemAvailable")
    return min([*unused, *([] if available is None else [available])], default=None)


def resident_memory() -> int:
    """Private resident memory of this process in bytes; 0 if unknown."""
    return _bytes_in("self/status", "RssAnon") or 0


def peak_resident_memory() -> int:
    """Most resident memory of this process so far, with shared pages, in bytes; 0 if unknown."""
    return _bytes_in("self/status", "VmHWM") or 0


def process_limit() -> int | None:
    """The smaller of this process's limits of data and addresses (`ulimit -d`, `ulimit -v`).

    None if it has neither.
    """
    return min((limit for limit, _ in _process_limits()), default=None)


def unused_process_memory() -> int | None:
    """Bytes that this process may still allocate under these limits; None if that is unknown."""
    known = ((limit, used) for limit, used in _process_limits() if used is not None)
    return min((max(0, limit - used) for limit, used in known), default=None)


def processor_quota() -> float | None:
    """CPU quota of this process's control group, in cores; None if there is no quota."""
    shared = shared_quota()
    return None if shared is None else shared[1]


def shared_quota() -> tuple[int, float] | None:
    """The control group of this process with the smallest CPU quota, and the quota in cores.

    The group's number is that of its folder, also in a container, where its path may be "/".
    """
    quotas = [(_quota_of(folder), folder) for folder in _groups("cpu")]
    known = [(quota, folder.stat().st_ino) for quota, folder in quotas if quota is not None]
    quota, group = min(known, default=(None, 0))
    return None if quota is None else (group, quota)


def shared_memory() -> tuple[int, int] | None:
    """Free and total bytes of `/dev/shm`; None if it does not exist."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def _bytes_in(file: str, field: str) -> int | None:
    """Bytes of a field of a file in `/proc`."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", _read(_PROC / file) or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _process_limits() -> Iterator[tuple[int, int | None]]:
    """Limit and use, in bytes, of data and addresses of this process, where there is a limit."""
    text = _read(_PROC / "self/limits") or ""
    for name, field in (("Max data size", "VmData"), ("Max address space", "VmSize")):
        found = re.search(rf"^{name} +(\d+) ", text, re.MULTILINE)
        if found:
            yield int(found[1]), _bytes_in("self/status", field)


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of every control group of this process that has a limit."""
    for folder in _groups("memory"):
        limit = _first(_number, folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _first(_number, folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and limit < _NO_LIMIT and used is not None:
            yield limit, max(0, used - _page_cache(folder))


def _page_cache(folder: Path) -> int:
    """Bytes of a group's use that the kernel can reclaim."""
    text = _read(folder / "memory.stat") or ""
    found = re.search(r"^total_inactive_file (\d+)$", text, re.MULTILINE) or re.search(
        r"^inactive_file (\d+)$", text, re.MULTILINE
    )
    return int(found[1]) if found else 0


def _quota_of(folder: Path) -> float | None:
    """CPU quota of one control group, in cores."""
    fields = (_read(folder / "cpu.max") or "").split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        return int(fields[0]) / int(fields[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period else None


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process, innermost first, cgroup version 1 or 2.

    In a container the path may be that of the host. Only the host's root may be mounted, so some of
    the folders may not exist.
    """
    for line in (_read(_PROC / "self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            root = _CGROUPS / controller
        elif number == "0" and not controllers:
            root = _CGROUPS
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield root / folder


def _first(read: Callable[[Path], int | None], *paths: Path) -> int | None:
    return next((value for value in map(read, paths) if value is not None), None)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" and -1 are no limits


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
