"""Storages: the memory of tensors, as savers and the profiler see it.

Savers look at storages: `torch.save` writes the whole storage of a tensor, and safetensors takes
tensors of one storage for tied weights and drops all but one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
    torch.jagged: ("values", "offsets", "lengths"),
}
"""Methods that return the parts of a tensor, by its layout."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


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
    if tensor.is_nested and tensor.layout is torch.strided:
        return [tensor.values(), tensor._nested_tensor_size()]
    if tensor.layout not in _PARTS:
        return [tensor]
    parts = (getattr(tensor, name)() for name in _PARTS[tensor.layout])
    return [part for part in parts if part is not None]


def has_plain_elements(tensor: Tensor) -> bool:
    """Whether its memory holds its elements as they are, so that `as_bytes` shows them."""
    is_packed = tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not is_packed


def bits_are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have equal bits; a NaN has those of itself."""
    integers = _INTEGERS[min(one.itemsize, 8)]
    return torch.equal(*(as_bytes(each.contiguous()).view(integers) for each in (one, other)))


def separate_elements(tensor: Tensor) -> None:
    """Give a tensor whose elements share memory (`expand`, `meshgrid`) memory of its own.

    Else PyTorch does not write to it.
    """
    if tensor.layout is not torch.strided:
        return
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in dims):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
