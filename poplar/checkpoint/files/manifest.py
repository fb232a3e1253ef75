"""`poplar.json`: what a checkpoint contains, with a checksum for every file.

[Note: format version]
An unknown version is refused. The files are those of `torch.distributed.checkpoint`, which needs no
`poplar.json`. (Version 1, with checksums of parts of files, was never released.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from poplar._core import crc32c
from poplar.checkpoint.files.data_file import Stored
from poplar.checkpoint.files.metadata_file import is_count
from poplar.checkpoint.files.stored_files import open_stored, read_stored
from poplar.values.errors import DamagedCheckpoint
from poplar.values.schema import Count, PositiveCount, from_fields, parse_json, to_json_types

NAME = "poplar.json"
VERSION = 2
"""See [Note: format version]."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint contains, the same for all ranks."""

    version: PositiveCount = VERSION
    step: Count | None
    """The caller's count of steps, if it was given."""
    world_size: PositiveCount
    stage: Count
    optimizer: str
    """Class name of the optimizer."""
    versions: Mapping[str, str]
    """Of the software that wrote it."""
    computes_in: Mapping[str, str]
    """By parameter that is not stored in the dtype in which the model computes, that dtype."""
    state: tuple[str, ...]
    """Names of what the caller added to the training state."""
    base: Mapping[str, str] = field(default_factory=dict)
    """By frozen parameter on which adapters were trained, and which was not saved, its shape and
    what kind of values it has. Empty: everything was saved."""
    files: Mapping[str, Stored] = field(default_factory=dict)
    """By file name, what was written."""

    def __post_init__(self) -> None:
        for name, dtype in self.computes_in.items():
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"computes_in[{name!r}] must be a dtype, got {dtype!r}")

    def to_text(self) -> str:
        """The content of the file."""
        text = _sorted_text(to_json_types(self))
        return f'{{"crc32c": {crc32c(text.encode())}, {text[1:]}\n'

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(stored.length for stored in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; the files are not read.

    Raises:
        DamagedCheckpoint: the manifest, or a file that it names, is missing, incomplete or changed.
        ValueError: the checkpoint has another format.
    """
    path, data = folder / NAME, read_stored(folder, NAME)
    try:
        content = parse_json(data)
        version, crc = content["version"], content.pop("crc32c")
        if not is_count(version) or version < 1:
            raise TypeError(f"version must be at least 1, got {version!r}")
        changed = crc != crc32c(_sorted_text(content).encode())
    except Exception as error:  # json and content of other types raise many
        raise DamagedCheckpoint(
            path, f"it is not a manifest of a checkpoint ({type(error).__name__}: {error})"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"{path} has format version {version}, but this version of Poplar reads version "
            f"{VERSION}; use the version of Poplar that wrote it, or update Poplar"
        )
    if changed:
        raise DamagedCheckpoint(path, "its checksum does not match its content")
    try:
        manifest = from_fields(Manifest, content)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"it has other fields than expected ({error})") from error
    check_files(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that all files are in a folder and have their sizes.

    Raises:
        DamagedCheckpoint: one is missing, has another size, or is no regular file in the folder.
    """
    for name, stored in manifest.files.items():
        with open_stored(folder, name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != stored.length:
            raise DamagedCheckpoint(
                folder / name, f"it has {found} bytes, but {stored.length} were written"
            )


def _sorted_text(content: Mapping[str, Any]) -> str:
    """Of which the checksum is computed."""
    return json.dumps(content, sort_keys=True)
