"""Storages: the memory of tensors as savers see it.

Savers look at storages: `torch.save` writes the whole storage of a tensor, and safetensors takes
tensors of one storage for tied weights and drops all but one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]


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
