"""The folder in memory of the ranks of one agent of torchrun, which outlives the ranks.

Its name has the process number and the start of the agent, so no other job reads it. The folder of
an agent that has ended stays until other ranks of the same user start on the host.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_ROOT = Path("/dev/shm")


def agent_folder() -> Path:
    """The folder for ranks of the parent of this process; those of parents that ended are removed.

    Raises:
        OSError: it cannot be made, or another user has made it.
    """
    # Containers may share the folder, but they do not see each other's processes.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    prefix = f"poplar-{os.getuid()}-{namespace}-"
    for other in _ROOT.glob(f"{prefix}*"):
        process, _, start = other.name.removeprefix(prefix).partition("-")
        if start != _start_of(int(process)):
            shutil.rmtree(other, ignore_errors=True)
    agent = os.getppid()
    folder = _ROOT / f"{prefix}{agent}-{_start_of(agent)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; pass another folder=")
    return folder


def _start_of(process: int) -> str:
    """When a process started, in ticks of the system's clock; empty if it has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]
