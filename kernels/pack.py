"""Packs many gradients into one flat bucket: scaled and rounded in one launch.

Contract: `pack_` in `poplar.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from poplar.ops.plain import check_places

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PAST = 2**62
"""The offset of the table's last entry, beyond any bucket."""


@triton.jit
def _load(address, offset, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load values as fp32; masked elements are undefined.

    `ALIGNED`: the address is a multiple of 16 bytes, so loads are vectorized. The compiler cannot
    derive that for an address from a table.
    """
    place = address.to(tl.pointer_type(TYPE)) + offset
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return tl.load(place, mask=mask).to(tl.float32)


@triton.jit
def _load_as_fp32(address, offset, mask, dtype, ALIGNED: tl.constexpr):
    """Load values of any of the dtypes as fp32."""
    if dtype == 0:
        value = _load(address, offset, mask, tl.float32, ALIGNED)
    elif dtype == 1:
        value = _load(address, offset, mask, tl.bfloat16, ALIGNED)
    else:
        value = _load(address, offset, mask, tl.float16, ALIGNED)
    return value


@triton.jit
def tile_values(table_ptr, begin, weight, segments, TILE: tl.constexpr):
    """The weighted values from element `begin` on, 0 in gaps, and which elements have one.

    A row of the table: address, first element, elements, dtype.
    """
    end = begin + TILE
    position = begin + tl.arange(0, TILE)
    low = tl.full([], 0, tl.int32)
    high = low + segments
    while low < high:  # binary search for the first segment that ends after `begin`
        middle = (low + high) // 2
        row = table_ptr + middle * 4
        if tl.load(row + 1) + tl.load(row + 2) <= begin:
            low = middle + 1
        else:
            high = middle
    row = table_ptr + low * 4
    first = tl.load(row + 1)
    dtype = tl.load(row + 3)
    if (first <= begin) & (first + tl.load(row + 2) >= end):  # like most tiles of large tensors
        place = tl.load(row) + (begin - first) * tl.where(dtype == 0, 4, 2)
        offset = tl.arange(0, TILE)
        if place % 16 == 0:
            value = _load_as_fp32(place, offset, None, dtype, ALIGNED=True)
        else:
            value = _load_as_fp32(place, offset, None, dtype, ALIGNED=False)
        product = value * weight
        covered = position >= 0
    else:
        product = tl.zeros([TILE], dtype=tl.float32)
        covered = position < 0
        while first < end:  # the table's last segment begins beyond any bucket
            mine = (position >= first) & (position < first + tl.load(row + 2))
            value = _load_as_fp32(
                tl.load(row), position - first, mine, tl.load(row + 3), ALIGNED=False
            )
            product = tl.where(mine, value * weight, product)
            covered = covered | mine
            row += 4
            first = tl.load(row + 1)
    return product, covered


@triton.jit
def pack_kernel(
    bucket_ptr,
    table_ptr,
    weight,
    numel,
    segments,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of the bucket."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    product, covered = tile_values(table_ptr, begin, weight, segments, TILE)
    position = begin + tl.arange(0, TILE)
    inside = position < numel
    out_ptr = bucket_ptr + position
    if ACCUMULATE:
        old = tl.load(out_ptr, mask=inside, other=0.0)
        # Gaps keep their exact bits.
        rounded = tl.where(
            covered, (old.to(tl.float32) + product).to(bucket_ptr.dtype.element_ty), old
        )
    else:
        rounded = product.to(bucket_ptr.dtype.element_ty)
    tl.store(out_ptr, rounded, mask=inside)


def value_table(
    flat: Sequence[Tensor], offsets: Sequence[int], device: torch.device
) -> tuple[Tensor, int]:
    """The table for `tile_values`, and the number of its rows that have elements."""
    rows = [
        (tensor.data_ptr(), offset, tensor.numel(), _CODES[tensor.dtype])
        for tensor, offset in zip(flat, offsets, strict=True)
        if tensor.numel()
    ]
    table = torch.tensor([*rows, (0, _PAST, 0, 0)], dtype=torch.int64, device="cpu")
    return table.to(device, non_blocking=True), len(rows)


def pack_(
    bucket: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    weight: float,
    accumulate: bool,
) -> None:
    """Launch the kernel."""
    check_places(bucket, grads, offsets)
    numel = bucket.numel()
    if numel == 0:
        return
    flat = [grad.contiguous() for grad in grads]
    table, segments = value_table(flat, offsets, bucket.device)
    pack_kernel[(triton.cdiv(numel, TILE),)](
        bucket,
        table,
        weight,
        numel,
        segments,
        ACCUMULATE=accumulate,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
