"""Exact sums of fp32 values. Contract: `exact_sum_` in `poplar.ops`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Values per program: a dozen reductions and atomics each. Not tuned yet."""


@triton.jit
def exact_sum_kernel(total_ptr, values_ptr, numel, TILE: tl.constexpr):
    """One tile, as in `csrc/include/poplar/exact_sum.h`."""
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(values_ptr + position, mask=position < numel, other=0.0)
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


def exact_sum_(total: Tensor, values: Tensor) -> None:
    """Launch the kernel; arguments must have been checked."""
    numel = values.numel()
    if numel:
        exact_sum_kernel[(triton.cdiv(numel, TILE),)](
            total, values, numel, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
