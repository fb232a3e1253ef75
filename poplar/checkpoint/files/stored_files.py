"""Opens the files of a checkpoint, which may come from a stranger, for reading."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from poplar.values.errors import DamagedCheckpoint
from poplar.values.regular_files import open_regular, read_regular

T = TypeVar("T")

DESCRIPTION_BYTES = 256 << 20
"""More than the metadata or the manifest of any checkpoint has; they are read into memory."""
_DAMAGE = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO)
"""Of errors that say what a file is, not what the system cannot do."""


def open_stored(folder: Path, name: str) -> int:
    """The descriptor of a regular file of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, is no regular file, or is outside of the folder.
        OSError: it cannot be opened.
    """
    return _access(folder, name, open_regular)


def read_stored(folder: Path, name: str) -> bytes:
    """The content of a file that describes a checkpoint.

    Raises:
        DamagedCheckpoint, OSError: as `open_stored`, or the file is too large.
    """
    return _access(folder, name, partial(read_regular, limit=DESCRIPTION_BYTES))


def _access(folder: Path, name: str, access: Callable[[Path], T]) -> T:
    path = folder / name
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise DamagedCheckpoint(
                folder,
                f"its file {name!r} is outside of this folder, where no file of a checkpoint may "
                "be, also not by a symbolic link (`cp -rL` copies the files of links)",
            )
        return access(path)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, "the file is missing") from error
    except ValueError as error:  # no file can have this name
        raise DamagedCheckpoint(folder / repr(name), f"no name of a file ({error})") from error
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedCheckpoint(path, f"it cannot be read ({error.strerror})") from error
        raise
