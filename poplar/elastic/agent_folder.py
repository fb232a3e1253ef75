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
        # All users can make folders here, with any names.
        if process.isdecimal() and start != _start_of(int(process)):
            shutil.rmtree(other, ignore_errors=True)
    agent = os.getppid()
    return private_folder(_ROOT / f"{prefix}{agent}-{_start_of(agent)}")


def private_folder(folder: Path, name: str = "") -> Path:
    """Make a folder to which only this user can write, or check that it is one.

    What is loaded from it may run any code.

    Args:
        folder: the folder, or with a name the one that has it, in which no other user may be able
            to replace it.

    Raises:
        OSError: it cannot be made.
        PermissionError: another user has made it or can write to it, with a name also that can
            replace it in `folder`; or one of them is a symbolic link.
    """
    private = folder / name
    for path in dict.fromkeys((folder, private)):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := _exposure(path, has_private=path != private):
            raise PermissionError(
                f"{path} {reason}, and objects that are loaded from {private} may run any code; "
                "pass a folder= that does not exist, which is then made for this user alone, or "
                "one of mode 700"
            )
    return private


def _exposure(folder: Path, *, has_private: bool) -> str:
    """Why other users can write to a folder; empty if they cannot.

    Args:
        has_private: it need only keep a folder of this user from others, as `/dev/shm` does.
    """
    status = folder.lstat()
    mode, owners = stat.S_IMODE(status.st_mode), {os.getuid()}
    if has_private:
        owners.add(0)
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link (the folder it leads to may serve)"
    if status.st_uid not in owners:
        return "belongs to another user"
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (has_private and mode & stat.S_ISVTX):
        return f"can be written by other users (mode {mode:o})"
    return ""


def _start_of(process: int) -> str:
    """When a process started, in ticks of the system's clock; empty if it has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()  # its name may be any bytes
    except OSError:
        return ""
    return status.rpartition(b")")[2].split()[19].decode()
