"""Values of any types, as a checkpoint stores them: made plain, compared between ranks, checked."""

from __future__ import annotations

import copyreg
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils._pytree import tree_map

from poplar.comm.copies import to_bytes
from poplar.system.storage import as_bytes

PLAIN = (bool, complex, float, int, str, type(None))
"""Types of values that never change and that `repr` tells apart."""
_BY_NAME = (type, FunctionType, BuiltinFunctionType)
"""Types of what pickle stores by its name."""


def with_python_numbers(value: Any) -> Any:
    """A value with NumPy's numbers in dicts, lists and tuples as Python's.

    Schedulers compute them, and by default they are not loaded: see `OpenedCheckpoint`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)):
        return value.item()
    if type(value) is dict:
        return {with_python_numbers(k): with_python_numbers(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_python_numbers, value))
    return value


@dataclass(frozen=True)
class State:
    """What the caller adds to a checkpoint."""

    values: Mapping[str, Any]
    digests: Mapping[str, int]

    @staticmethod
    def of(state: Mapping[str, Any]) -> State:
        """The state dicts of objects, and other values themselves."""
        values = {
            name: with_python_numbers(value.state_dict() if hasattr(value, "state_dict") else value)
            for name, value in state.items()
        }
        return State(values, {name: digest(value) for name, value in values.items()})


def digest(value: Any) -> int:
    """Equal for values of which pickle writes the same, in any order of mappings and sets.

    Raises:
        TypeError: it cannot be pickled.
    """
    return _digest(value, {})


def _digest(value: Any, known: dict[int, tuple[Any, int]]) -> int:
    """As `digest`; `known` has the values that were met before, which may contain this one."""
    if isinstance(value, PLAIN):
        return _of_text(repr(value))
    if id(value) not in known:
        known[id(value)] = value, _of_text("a value around this one")
        known[id(value)] = value, _of_content(value, lambda part: _digest(part, known))
    return known[id(value)][1]


def _of_content(value: Any, digest: Callable[[Any], int]) -> int:
    """The digest of a value from those of its parts."""
    if isinstance(value, Tensor):
        data = to_bytes(as_bytes(value.cpu().contiguous()))
        return _of_text(f"{value.dtype} {tuple(value.shape)} {zlib.crc32(data)}")
    if isinstance(value, bytes):
        return _of_text(f"bytes {zlib.crc32(value)}")
    if isinstance(value, Mapping):
        entries = sorted((digest(key), digest(entry)) for key, entry in value.items())
        return _of_text(f"mapping {entries}")
    if isinstance(value, (set, frozenset)):
        return _of_text(f"set {sorted(map(digest, value))}")
    if isinstance(value, (list, tuple)):
        return _of_text(f"sequence {[digest(entry) for entry in value]}")
    if isinstance(value, _BY_NAME):
        return _of_text(f"{value.__module__}.{value.__qualname__}")
    # What pickle stores of an object: a function, its arguments, and state.
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return _of_text(f"{type(value).__qualname__} {reduced}")
    return digest([list(part) if isinstance(part, Iterator) else part for part in reduced])


def _of_text(text: str) -> int:
    return zlib.crc32(text.encode())


def refused_classes(value: Any) -> list[str]:
    """What a load with `weights_only=True` refuses of a value; empty if it cannot be pickled."""
    file = io.BytesIO()
    try:
        torch.save(tree_map(_without_elements, value), file)
    except Exception:  # any type; the save reports it
        return []
    file.seek(0)
    return sorted(get_unsafe_globals_in_checkpoint(file))


def _without_elements(value: Any) -> Any:
    return torch.empty(0, dtype=value.dtype, device="cpu") if type(value) is Tensor else value
