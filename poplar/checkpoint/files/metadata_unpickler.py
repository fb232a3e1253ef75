"""Unpickles the metadata of a checkpoint, and nothing else.

The file may come from a stranger, and a pickle is a program: it calls what it names. `Unpickler`
knows torch's classes of metadata and no others, runs only the instructions that their pickles have,
and fills plain fields.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
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
