"""Copies between flat tensors, each by what is fastest for its size."""

from __future__ import annotations

import torch
from torch import Tensor

from poplar import ops

_LARGE = 1 << 22
"""Bytes from which the operator writes past the caches; below, torch's own call is cheaper."""


def copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`; both 1-D, contiguous, of one dtype and size."""
    if target.numel() * target.element_size() < _LARGE:
        target.copy_(source)
    else:
        ops.copy_(target, source)


def copy_around(target: Tensor, source: Tensor, low: int, high: int) -> None:
    """Copy everything but `[low, high)`."""
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
