"""`.metadata`: names, shapes and places of all values, as `torch.distributed.checkpoint` writes it.

The file is a pickle, which calls what it names. `_Unpickler` knows torch's classes of metadata and
no others, so that the checkpoint of a stranger runs nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from poplar.checkpoint.files.stored_files import read_stored
from poplar.values.errors import DamagedCheckpoint

METADATA = ".metadata"

_PATHS = ("PosixPath", "PurePosixPath", "PureWindowsPath")
_NAMES: Mapping[str, Collection[str]] = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""By module, what metadata consists of, besides dtypes."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it needs {module}.{name}, which is no part of metadata; nothing ran")


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or is not the metadata of a checkpoint.
        OSError: it cannot be read.
    """
    data = read_stored(folder, METADATA)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if type(metadata) is not Metadata:
            raise TypeError(f"it is a {type(metadata).__name__}")
    except Exception as error:  # content that is no pickle raises many types
        reason = f"{type(error).__name__}: {error}"[:500]
        raise DamagedCheckpoint(
            folder / METADATA, f"it is not the metadata of a checkpoint ({reason})"
        ) from error
    return metadata
