"""One safetensors file, of which any range of elements can be read.

The library maps files as private, writable memory, so a file that is larger than a memory limit
(`RLIMIT_DATA`) cannot be opened with it, and it reads whole rows. It checks the header; elements
are read here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from poplar.values.regular_files import open_regular
from poplar.values.schema import parse_json

_NAMES: Mapping[torch.dtype, str] = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _is_readable(name: str) -> bool:
    """Whether the installed version of the library knows a dtype; early ones lack complex64."""
    header = json.dumps({"": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        load(len(header).to_bytes(8, "little") + header)
    except (SafetensorError, KeyError):
        return False
    return True


DTYPES: Mapping[torch.dtype, str] = {d: name for d, name in _NAMES.items() if _is_readable(name)}
"""Names of dtypes in headers."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""


class SafetensorsFile:
    """The tensors of one file, by name."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: there is no such file, or it is truncated or not in this format.
        """
        self.path = path
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                # The library checks names, places, the sizes of header and file, and nesting.
                with safe_open(path, framework="np"):
                    pass
                header_bytes = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(header_bytes))
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"cannot read {path} as safetensors ({error}); it is missing, truncated or of "
                "another format"
            ) from error
        header.pop("__metadata__", None)
        self.tensors = {
            name: Stored(
                entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of a flattened tensor, on the CPU.

        Raises:
            OSError: the file cannot be read, or has become shorter.
            ValueError: its dtype is not supported.
        """
        stored = self.tensors[name]
        if stored.dtype not in _BY_NAME:
            raise ValueError(
                f"{name!r} in {self.path} has the dtype {stored.dtype}; supported are "
                f"{', '.join(_BY_NAME)}"
            )
        start, stop = max(0, start), min(stop, math.prod(stored.shape))
        values = torch.empty(max(0, stop - start), dtype=_BY_NAME[stored.dtype], device="cpu")
        buffer = values.view(torch.uint8).numpy().data
        place = stored.begin + start * values.itemsize
        with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
            while buffer:
                count = os.preadv(file.fileno(), [buffer], place)
                if not count:
                    raise OSError(f"{self.path} ends at byte {place}, inside {name!r}")
                buffer, place = buffer[count:], place + count
        return values
