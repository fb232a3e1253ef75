"""The folder in memory of the ranks of one agent of torchrun, which outlives the ranks.

Its name has the process number and the start of the agent, so no other job reads it. The folder of
an agent that has ended stays until other ranks of the same user start in the same PID namespace.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_ROOT = Path("/dev/shm")


def agent_folder() -> Path:
    """The folder for ranks of the parent of this process; those of parents that ended are removed.

    Raises:
        OSError: as `private_folder`.
    """
    # Containers may share the folder, but they do not see each other's processes.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    prefix = f"poplar-{os.getuid()}-{namespace}-"
    for other in _ROOT.glob(f"{prefix}*"):
        process, _, start = other.name.removeprefix(prefix).partition("-")
        if start != _start_of(int(process)):
            shutil.rmtree(other, ignore_errors=True)
    agent = os.getppid()
    return private_folder(_ROOT / f"{prefix}{agent}-{_start_of(agent)}")


def private_folder(folder: Path) -> Path:
    """Make a folder to which only this user can write, or check that it is one.

    What is loaded from it may run any code.

    Raises:
        OSError: it cannot be made.
        PermissionError: another user has made it or can write to it, or it is a symbolic link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        reason = "is a symbolic link"
    elif status.st_uid != os.getuid():
        reason = "belongs to another user"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return folder
    raise PermissionError(
        f"{folder} {reason}, and objects that are loaded from it may run any code; pass a folder= "
        "that does not exist, which is then made for this user alone, or one of mode 700"
    )


def _start_of(process: int) -> str:
    """When a process started, in ticks of the system's clock; empty if it has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]
