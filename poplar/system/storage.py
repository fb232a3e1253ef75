"""Storages: the memory of tensors, as savers and the profiler see it.

Savers look at storages: `torch.save` writes the whole storage of a tensor, and safetensors takes
tensors of one storage for tied weights and drops all but one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def with_own_storage(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, whose storage has no other elements.

    The memory exists as long as the result does, unless the storage of `tensor` is resized.

    Args:
        tensor: contiguous.
    """
    with torch.inference_mode(False):
        # As bytes, because DLPack does not know every dtype.
        own: Tensor = from_dlpack(to_dlpack(as_bytes(tensor)))
        return own.view(tensor.dtype).view(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, 1-D. A single element may have any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with a storage that a sparse or nested tensor consists of; else itself alone."""
    if tensor.is_nested:
        if tensor.layout is torch.strided:
            return [tensor.values(), tensor._nested_tensor_size()]
        jagged: Any = tensor
        bounds = jagged.offsets(), jagged.lengths()
        return [tensor.values(), *(each for each in bounds if each is not None)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
