"""Batches of other lengths than the example batch, cut or repeated along dim 1."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from poplar.data import pytree

PyTree = TypeVar("PyTree")


def padded_length(batch: Any) -> int:
    """The largest dim 1 of a tensor in the batch; 0 if no tensor has one."""
    tensors = (t for t in pytree.tensors(batch) if not t.is_nested)  # which has no padding
    return max((int(t.shape[1]) for t in tensors if t.dim() > 1), default=0)


def at_length(batch: PyTree, length: int) -> PyTree:
    """The batch with another padded length: tensors whose dim 1 is that length are cut or repeated.

    Args:
        batch: with at least one such tensor.
        length: at least 1.
    """
    present = padded_length(batch)

    def resized(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != present:
            return tensor
        places = torch.arange(length, device=tensor.device) % present
        return tensor.index_select(1, places)

    return pytree.map_tensors(resized, batch) if length != present else batch
