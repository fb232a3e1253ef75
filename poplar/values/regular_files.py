"""Opens files that a stranger may have made: regular ones only, without waiting for a writer.

Opening a FIFO waits until another process writes to it, and a device may have no end. Errors of
writing name their file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_regular(path: str | Path) -> int:
    """The descriptor of a regular file, for reading.

    Raises:
        OSError: it cannot be opened, or is a FIFO, a device, a socket or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: str | Path, limit: int = 1 << 30) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes are more than {limit}", str(path))
        return file.read(size)


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """A context whose errors name the file: those of writing, as to a full disk, do not.

    Raises:
        OSError: as raised inside, with the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
