"""`.metadata`: names, shapes and places of all values, as `torch.distributed.checkpoint` writes it.

Everything is checked before it is used: the file may be damaged, or come from a stranger. A pickle
is a program: it calls what it names. `Unpickler` knows torch's classes of metadata and no others,
runs only the instructions that their pickles have, and fills plain fields.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
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
_MOST_STEPS = 256
"""More levels than nested state has."""
_DIMS = 64
"""More dimensions than tensors have."""

_CLASSES: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        Metadata,
        TensorStorageMetadata,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        StorageMeta,
        _StorageInfo,
        TensorProperties,
    )
}
_FIELDS = {kind: {field.name for field in fields(kind)} for kind in _CLASSES.values()}
_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # of properties, before torch 2.3
}
_OPCODES = frozenset(
    getattr(pickle, name)[0]
    for name in (
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    )
)
"""What Python writes of metadata with the protocols 4 and 5."""


def _size(values: Any) -> torch.Size:
    expect(type(values) is tuple and len(values) <= _DIMS, "a shape", values)
    expect(all(map(is_count, values)), "a shape", values)
    return torch.Size(values)


_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _get_layout,
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

    It extends the unpickler in Python: that in C reserves memory for what a file only claims.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code in _OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module in _MODULES and name in _CLASSES:
            return _CLASSES[name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"it needs {module}.{name}, which is no part of metadata; nothing ran")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        expect(any(function is f for f in _FUNCTIONS.values()), "a call of", function)
        expect(type(arguments) is tuple, "arguments in", arguments)
        if function is not _size:  # nested tuples take exponential time to hash or to print
            expect({str, int}.issuperset(map(type, arguments)), "arguments in", arguments)
        self.stack.append(function(*arguments))

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        expect(any(kind is k for k in _CLASSES.values()) and arguments == (), "a new", kind)
        self.stack.append(kind.__new__(kind))

    def load_build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        kind = type(instance)
        expect(any(kind is k for k in _CLASSES.values()), "the state of", instance)
        if kind is TensorProperties:
            expect(type(state) is tuple and len(state) == 5, "properties in", state)
            expect(type(state[3]) is _MEM_FORMAT_ENCODING, "a memory format in", state[3])
            instance.__setstate__(state)
            return
        instance.__dict__.update((name, state[name]) for name in _FIELDS[kind] & state.keys())
        if kind is MetadataIndex:  # it is hashed, which must not take long
            check_index(instance)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: Sequence[Any]) -> None:
        mapping = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            expect(type(mapping) is dict and type(key) in (str, MetadataIndex), "the key", key)
            mapping[key] = value

    dispatch.update(
        {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.BUILD[0]: load_build,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )


def check_index(index: MetadataIndex) -> None:
    """Check a key, before it is hashed."""
    expect(type(index.fqn) is str, "the name", index.fqn)
    expect(index.offset is None or type(index.offset) is torch.Size, "the offset of", index.fqn)
    expect(index.index is None or is_count(index.index), "the number of", index.fqn)


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
        metadata = Unpickler(io.BytesIO(data)).load()
        _check(metadata)
    except Exception as error:  # content that is no pickle raises many types
        reason = f"{type(error).__name__}: {error}"[:500]
        raise DamagedCheckpoint(
            folder / METADATA, f"it is not the metadata of a checkpoint ({reason})"
        ) from error
    found: Metadata = metadata
    return found


def _check(metadata: Any) -> None:
    """Check all that is read of the metadata."""
    expect(type(metadata) is Metadata, "the whole,", metadata)
    described, places = metadata.state_dict_metadata, metadata.storage_data
    expect(type(described) is dict, "the shapes,", described)
    expect(type(places) is dict, "the places,", places)
    left = len(places)
    sizes: dict[str, dict[Any, int]] = {}
    for name, found in described.items():
        expect(type(name) is str, "the name", name)
        if type(found) is not BytesStorageMetadata:
            expect(type(found) is TensorStorageMetadata, "the shape of", name)
            expect(type(found.chunks) is list, "the parts of", name)
            left -= len(found.chunks)  # tensors that share one list would take long
            expect(left >= 0, "more parts than places, from here on:", name)
            sizes[name] = _part_sizes(name, found)
    for index, place in places.items():
        expect(type(index) is MetadataIndex and index.fqn in described, "the place of", index)
        _check_place(index, place, sizes.get(index.fqn))
    _check_paths(metadata.planner_data)


def _part_sizes(name: str, found: TensorStorageMetadata) -> dict[Any, int]:
    """The bytes of each part of a tensor, by its offsets."""
    properties, size = found.properties, found.size
    expect(type(properties) is TensorProperties, "the properties of", name)
    expect(isinstance(properties.dtype, torch.dtype), "the dtype of", name)
    boxes = []
    for chunk in found.chunks:
        expect(type(chunk) is ChunkStorageMetadata, "the parts of", name)
        boxes.append((chunk.offsets, chunk.sizes))
    for shape in (size, *itertools.chain(*boxes)):
        expect(type(shape) is torch.Size and len(shape) == len(size), "a shape of", name)
    expect(_tiles(size, boxes), "parts that do not make up the shape of", name)
    itemsize = properties.dtype.itemsize
    return {offsets: math.prod(sizes) * itemsize for offsets, sizes in boxes}


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


def _check_place(index: MetadataIndex, place: Any, sizes: Mapping[Any, int] | None) -> None:
    name = index.fqn
    expect(type(place) is _StorageInfo, "the place of", name)
    expect(type(place.relative_path) is str, "the file of", name)
    expect(is_count(place.offset) and is_count(place.length), "the bytes of", name)
    expect(place.transform_descriptors is None, "transforms, such as compression, of", name)
    if sizes is not None:
        expect(index.offset in sizes, "a place that is of no part of", name)
        expect(place.length >= sizes[index.offset], "fewer bytes than elements of", name)


def _check_paths(paths: Any) -> None:
    """Check the places of values in the nested form: names of entries, and indices of lists."""
    expect(paths is None or type(paths) is dict, "the nested form,", paths)
    for name, path in (paths or {}).items():
        expect(type(path) is tuple and 0 < len(path) <= _MOST_STEPS, "the nested form of", name)
        for step in path:
            is_index = is_count(step) and step < len(paths)
            expect(type(step) is str or is_index, "the nested form of", name)
