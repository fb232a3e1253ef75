"""Exact sums of fp32 values. Contract: `exact_sum_` in `poplar.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .table import first_tiles, row_of, table_of

TILE = 4096
"""Values per program: a dozen reductions and atomics each. Not tuned yet."""


@triton.jit
def exact_sum_kernel(total_ptr, table_ptr, rows, TILE: tl.constexpr):
    """One tile, as in `csrc/include/poplar/exact_sum.h`. A row: first tile, address, elements."""
    tile = tl.program_id(0).to(tl.int64)
    row = row_of(table_ptr, rows, tile, 3)
    position = (tile - tl.load(row)) * TILE + tl.arange(0, TILE)
    values_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    values = tl.load(values_ptr + position, mask=position < tl.load(row + 2), other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    mantissa = tl.where(exponent == 0, fraction, fraction | 0x800000).to(tl.int64)
    place = tl.maximum(exponent - 1, 0)
    shifted = mantissa << (place % 28).to(tl.int64)
    finite = exponent != 0xFF
    sign = tl.where(finite, tl.where(bits < 0, -1, 1), 0).to(tl.int64)
    low = sign * (shifted & 0xFFFFFFF)
    high = sign * (shifted >> 28)
    first = place // 28
    for word in tl.static_range(10):
        own = tl.where(first == word, low, 0) + tl.where(first + 1 == word, high, 0)
        tl.atomic_add(total_ptr + word, tl.sum(own, axis=0))
    tl.atomic_add(total_ptr + 15, tl.sum(tl.where(finite, 0, 1).to(tl.int64), axis=0))


def exact_sum_(total: Tensor, values: Sequence[Tensor]) -> None:
    """Launch the kernel."""
    parts = [part for part in values if part.numel()]
    firsts, tiles = first_tiles([part.numel() for part in parts], TILE)
    if not tiles:
        return
    rows = [
        (first, part.data_ptr(), part.numel()) for first, part in zip(firsts, parts, strict=True)
    ]
    table = table_of(rows, total.device)
    exact_sum_kernel[(tiles,)](
        total, table, len(rows), TILE=TILE, num_warps=4, enable_fp_fusion=False
    )
