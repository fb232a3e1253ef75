"""Digests of values, to find out whether all ranks have the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from poplar.comm.copies import to_bytes

PLAIN = (bool, bytes, complex, float, int, str, type(None))
"""Types of values that never change and that `repr` tells apart."""


def digest(value: Any) -> int:
    """Equal for equal numbers, strings, tensors, and containers of these. Of others, the type."""
    if isinstance(value, Tensor):
        data = to_bytes(value.detach().cpu().contiguous().reshape(-1))
        return _of_text(f"{value.dtype} {tuple(value.shape)} {zlib.crc32(data)}")
    if isinstance(value, Mapping):
        entries = sorted((repr(key), digest(entry)) for key, entry in value.items())
        return _of_text(f"mapping {entries}")
    if isinstance(value, (list, tuple)):
        return _of_text(f"sequence {[digest(entry) for entry in value]}")
    return _of_text(repr(value) if isinstance(value, PLAIN) else type(value).__qualname__)


def _of_text(text: str) -> int:
    return zlib.crc32(text.encode())
