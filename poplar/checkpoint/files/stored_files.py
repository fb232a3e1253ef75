"""Opens the files of a checkpoint, which may come from a stranger, for reading."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from poplar.values.errors import DamagedCheckpoint
from poplar.values.regular_files import open_regular

DESCRIPTION_BYTES = 256 << 20
"""More than the metadata or the manifest of any checkpoint has; they are read into memory."""
_DAMAGE = (errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO)
"""Of errors that say what a file is, not what the system cannot do."""


def open_stored(folder: Path, name: str) -> io.BufferedReader:
    """Open a regular file of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, is no regular file, or is outside of the folder.
        OSError: it cannot be opened.
    """
    path = folder / name
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise DamagedCheckpoint(
                folder,
                f"its file {name!r} is outside of this folder, where no file of a checkpoint may "
                "be, also not by a symbolic link (`cp -rL` copies the files of links)",
            )
        return os.fdopen(open_regular(path), "rb")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, "the file is missing") from error
    except ValueError as error:  # no file can have this name
        raise DamagedCheckpoint(folder / repr(name), f"no name of a file ({error})") from error
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedCheckpoint(path, f"it cannot be read ({error.strerror})") from error
        raise


def read_stored(folder: Path, name: str) -> bytes:
    """The content of a file that describes a checkpoint.

    Raises:
        DamagedCheckpoint, OSError: as `open_stored`, or the file is too large.
    """
    with open_stored(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > DESCRIPTION_BYTES:
            raise DamagedCheckpoint(folder / name, f"{size} bytes are more than any has")
        return file.read()
