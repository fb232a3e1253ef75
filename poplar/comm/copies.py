"""Copies between flat tensors, by the faster method for their size."""

from __future__ import annotations

import torch
from torch import Tensor

from poplar import ops

_STREAMING_BYTES = 1 << 22
"""From this size on, non-temporal stores (`ops.copy_`) are faster than torch's own copy."""


def copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` for 1-D contiguous tensors of the same dtype and size."""
    if target.numel() * target.element_size() < _STREAMING_BYTES:
        target.copy_(source)
    else:
        ops.copy_(target, source)


def copy_except(target: Tensor, source: Tensor, low: int, high: int) -> None:
    """Copy all elements except `[low, high)`."""
    if low == high:
        copy(target, source)
        return
    if low > 0:
        copy(target[:low], source[:low])
    if high < source.numel():
        copy(target[high:], source[high:])


def to_bytes(tensor: Tensor) -> bytearray:
    """The bytes of a 1-D contiguous CPU tensor, without NumPy, which PyTorch does not require."""
    copied = bytearray(tensor.numel() * tensor.element_size())
    if copied:
        torch.frombuffer(copied, dtype=torch.uint8).copy_(tensor.view(torch.uint8))
    return copied
