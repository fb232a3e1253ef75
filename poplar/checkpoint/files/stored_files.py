"""Opens the files of a checkpoint for reading."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

from poplar.values.errors import DamagedCheckpoint


def open_stored(folder: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, is a folder, or is outside of the checkpoint's folder.
        OSError: it cannot be opened.
    """
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DamagedCheckpoint(
            folder,
            f"its file {name!r} is outside of this folder, where no file of a checkpoint may be, "
            "also not by a symbolic link (`cp -rL` copies the files of links)",
        )
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, "the file is missing") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpoint(path, "it is no file") from error


def read_stored(folder: Path, name: str) -> bytes:
    """The content of a file that describes a checkpoint.

    Raises:
        DamagedCheckpoint, OSError: as `open_stored`.
    """
    with open_stored(folder, name) as file:
        return file.read()
