"""`.metadata`: names, shapes and places of all values, as `torch.distributed.checkpoint` writes it.

The file may be damaged, or come from a stranger. A pickle is a program: it calls what it names.
`Unpickler` knows torch's classes of metadata and no others, and what it has made is checked before
it is used.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from poplar.checkpoint.files.stored_files import read_stored
from poplar.values.errors import DamagedCheckpoint

METADATA = ".metadata"

_MOST_CUT_DIMS = 8
"""More dimensions than the parts of one tensor are cut along."""

_CLASSES = (
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    _StorageInfo,
    TensorProperties,
)
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # of properties, before torch 2.3
)
_KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    **{(module, kind.__name__): kind for module in _MODULES for kind in _CLASSES},
    **{
        (module, name): _MEM_FORMAT_ENCODING
        for module in _MODULES
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
    },
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class Unpickler(pickle._Unpickler):
    """Makes metadata.

    What a pickle may call is in `_KNOWN`, and only makes a value of its arguments. It extends the
    unpickler in Python, because that in C sets attributes of any object, such as a class.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"it needs {module}.{name}, which is no part of metadata; nothing ran")

    def get_extension(self, code: int) -> None:
        """Refuse what another pickle has looked up: its class may be any."""
        raise ValueError(f"it needs the class that was registered as {code}; nothing ran")

    def load_build(self) -> None:
        """Set the fields of new metadata, and of nothing that other code uses."""
        state, instance = self.stack.pop(), self.stack[-1]
        kind = type(instance)
        expect(kind in _CLASSES, "the state of", instance)
        if kind is TensorProperties:
            instance.__setstate__(state)
        else:
            instance.__dict__.update(state)

    dispatch[pickle.BUILD[0]] = load_build


def is_count(value: Any) -> bool:
    """Whether a value is a whole number that a size or an offset may be."""
    return type(value) is int and 0 <= value < 1 << 63


def expect(condition: bool, what: str, value: Any) -> None:
    """Raise unless a condition holds; of a value that may be huge, only the type is shown."""
    if not condition:
        shown = repr(value[:100]) if type(value) is str else f"a {type(value).__name__}"
        raise ValueError(f"{what} {shown}")


def read_metadata(folder: Path) -> Metadata:
    """Read and check the metadata of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or is not the metadata of a checkpoint.
        OSError: it cannot be read.
    """
    data = read_stored(folder, METADATA)
    try:
        metadata: Metadata = Unpickler(io.BytesIO(data)).load()
        _check(metadata)
    except Exception as error:  # content that is no pickle, or lacks fields, raises many types
        reason = f"{type(error).__name__}: {error}"[:500]
        raise DamagedCheckpoint(
            folder / METADATA, f"it is not the metadata of a checkpoint ({reason})"
        ) from error
    return metadata


def _check(metadata: Metadata) -> None:
    """Check all that is read of the metadata."""
    described, places = metadata.state_dict_metadata, metadata.storage_data
    for name, found in described.items():
        expect(type(name) is str, "the name", name)
        if not isinstance(found, BytesStorageMetadata):
            _check_tensor(name, found)
    for index, place in places.items():
        name = index.fqn
        expect(type(index) is MetadataIndex and name in described, "the place of", name)
        expect(type(place) is _StorageInfo, "the place of", name)
        expect(type(place.relative_path) is str, "the file of", name)
        expect(is_count(place.offset) and is_count(place.length), "the bytes of", name)
        expect(place.transform_descriptors is None, "transforms, such as compression, of", name)
    for name, path in (metadata.planner_data or {}).items():
        expect(type(path) is tuple and path != (), "the nested form of", name)
        for step in path:  # torch fills a list up to an index
            is_index = is_count(step) and step < len(metadata.planner_data)
            expect(type(step) is str or is_index, "the nested form of", name)


def _check_tensor(name: str, found: TensorStorageMetadata) -> None:
    """Check shapes and parts."""
    expect(type(found) is TensorStorageMetadata, "the shape of", name)
    expect(isinstance(found.properties.dtype, torch.dtype), "the dtype of", name)
    size = found.size
    for shape in (size, *itertools.chain(*((part.offsets, part.sizes) for part in found.chunks))):
        is_shape = type(shape) is torch.Size and len(shape) == len(size)
        expect(is_shape and all(map(is_count, shape)), "a shape of", name)
    boxes = [(part.offsets, part.sizes) for part in found.chunks]
    expect(_tiles(size, boxes), "parts that do not make up the shape of", name)


def _tiles(size: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets and sizes) cover a tensor once: the signs of their corners cancel."""
    whole = (torch.Size([0] * len(size)), size)
    if all(box == whole for box in boxes):
        return len(boxes) == 1 or 0 in size
    cut = [
        dim
        for dim in range(len(size))
        if any((offsets[dim], sizes[dim]) != (0, size[dim]) for offsets, sizes in boxes)
    ]
    if len(cut) > _MOST_CUT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if 0 in sizes:
            continue
        for upper in itertools.product((0, 1), repeat=len(cut)):
            ends = zip(cut, upper, strict=True)
            corner = tuple(offsets[dim] + is_upper * sizes[dim] for dim, is_upper in ends)
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())
