"""New files: written beside their final names, and locked so that other programs see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from poplar.values.regular_files import naming


def aside_name(path: Path) -> Path:
    """Where a file or a checkpoint is while it is incomplete."""
    return path.with_name(f"{path.name}.incomplete")


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A context that writes a file, which gets its name once it is complete on the disk.

    Nothing remains of it if the context raises.

    Raises:
        FileExistsError: another program writes it.
        OSError: it cannot be written.
    """
    with naming(path), open_aside(path) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            aside_name(path).replace(path)
        except BaseException:
            discard(path, file)
            raise


def open_aside(path: Path) -> BinaryIO:
    """A new file with the name `aside_name(path)`, locked.

    Rename or `discard` it before it is closed: later it may belong to another program.

    Raises:
        FileExistsError: another program writes it.
        OSError: it cannot be made.
    """
    aside = aside_name(path)
    check_no_writer([aside])
    aside.unlink(missing_ok=True)
    file = aside.open("xb")
    lock(file)
    return file


def discard(path: Path, file: BinaryIO) -> None:
    """Remove and close what `open_aside` made."""
    aside_name(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # of a full disk, to which the buffer cannot be written
        file.close()


def lock(file: IO[bytes]) -> None:
    """Let `has_writer` see that this process writes a new file until it closes it."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)  # another process holds it while it looks, not longer


def has_writer(path: Path, *, if_unknown: bool) -> bool:
    """Whether a process of this host has not closed a file that it has locked."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return if_unknown
    return False


def check_no_writer(paths: Iterable[Path]) -> None:
    """Raise if another save writes one of these files, which are about to be replaced."""
    for path in paths:
        if has_writer(path, if_unknown=False):
            raise FileExistsError(
                f"another save is writing {path} now; let each program save under another name, or "
                "save again when the other one has ended"
            )
