"""`poplar.json`: what a checkpoint contains, with a checksum for every part of every file.

[Note: format version]
Later versions of Poplar read every version up to their own; an unknown, newer version is refused.
Files of version 1 are those of `torch.distributed.checkpoint`, which needs no `poplar.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from poplar._core import crc32c
from poplar.errors import DamagedCheckpoint

NAME = "poplar.json"
VERSION = 1
"""See [Note: format version]."""


class Part(NamedTuple):
    """A range of bytes of a file, with its checksum (CRC-32C)."""

    offset: int
    length: int
    crc32c: int
    values: int | None = None
    """Of a tensor: where its elements start, contiguous and in row-major order."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint contains, the same for all ranks."""

    version: int = VERSION
    step: int | None
    """The caller's count of steps, if it was given."""
    world_size: int
    stage: int
    optimizer: str
    """Class name of the optimizer."""
    versions: Mapping[str, str]
    """Of the software that wrote it."""
    computes_in: Mapping[str, str]
    """By parameter that is not stored in the dtype in which the model computes, that dtype."""
    state: Sequence[str]
    """Names of what the caller added to the training state."""
    files: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    """By file name, its parts; they cover the file."""

    def to_text(self) -> str:
        """The content of the file."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["versions"], content["computes_in"] = dict(self.versions), dict(self.computes_in)
        content["files"] = {name: list(parts) for name, parts in self.files.items()}
        text = _sorted_text(content)
        return f'{{"crc32c": {crc32c(text.encode())}, {text[1:]}\n'

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.length for parts in self.files.values() for part in parts)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; the files are not read.

    Raises:
        DamagedCheckpoint: the manifest, or a file that it names, is missing, incomplete or changed.
        ValueError: the checkpoint has a newer format.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
        version, crc = int(content["version"]), content.pop("crc32c")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            path, f"it is not a manifest of a checkpoint ({error!r})"
        ) from error
    if version > VERSION:
        raise ValueError(
            f"{path} has format version {version}, but this version of Poplar reads versions up to "
            f"{VERSION}; update Poplar"
        )
    if crc != crc32c(_sorted_text(content).encode()):
        raise DamagedCheckpoint(path, "its checksum does not match its content")
    files = content.pop("files")
    try:
        manifest = Manifest(
            **content,
            files={name: [Part(*part) for part in parts] for name, parts in files.items()},
        )
    except TypeError as error:
        raise DamagedCheckpoint(path, f"it has other fields than expected ({error})") from error
    check_files(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that all files are in a folder and have their sizes.

    Raises:
        DamagedCheckpoint: one is missing or has another size.
    """
    for name, parts in manifest.files.items():
        path, expected = folder / name, sum(part.length for part in parts)
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpoint(path, "the file is missing") from error
        if found != expected:
            raise DamagedCheckpoint(path, f"it has {found} bytes, but {expected} were written")


def _sorted_text(content: Mapping[str, Any]) -> str:
    """Of which the checksum is computed."""
    return json.dumps(content, sort_keys=True)
