"""The gradient norm and the clip coefficient, one launch each.

Contracts: `exact_norm` and `clip_coefficient` in `poplar.ops`. The order of operations is that of
`csrc/include/poplar/clip.h`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LAST = 15
"""The word of an exact sum that counts the values that are not finite."""


@triton.jit
def exact_norm_kernel(norm_ptr, totals_ptr, rows, distance, LAST: tl.constexpr):
    """Word by word, in the order of the C++ code."""
    total = tl.full([], 0.0, tl.float64)
    carry = tl.full([], 0, tl.int64)
    for word in tl.static_range(LAST):
        carried = carry
        for row in range(rows):
            carried += tl.load(totals_ptr + row * distance + word)
        unit = tl.full([], (28 * word - 149 + 1023) << 52, tl.int64).to(tl.float64, bitcast=True)
        total += (carried & 0xFFFFFFF).to(tl.float64) * unit
        carry = carried >> 28
    bad = tl.full([], 0, tl.int64)
    for row in range(rows):
        bad += tl.load(totals_ptr + row * distance + LAST)
    tl.store(norm_ptr, tl.where(bad == 0, tl.sqrt(total), float("inf")))


@triton.jit
def clip_coefficient_kernel(coefficient_ptr, norm_ptr, scale_ptr, max_norm, SCALED: tl.constexpr):
    """NaN stays NaN."""
    norm = tl.load(norm_ptr)
    if SCALED:
        norm = norm * tl.load(scale_ptr)
    ratio = tl.full([], max_norm, tl.float32) / (norm + tl.full([], 1e-6, tl.float64))
    tl.store(coefficient_ptr, tl.where(ratio >= 1.0, 1.0, ratio))


def exact_norm(totals: Tensor) -> Tensor:
    """Launch the kernel."""
    norm = totals.new_empty((), dtype=torch.float64)
    rows, distance = totals.shape
    exact_norm_kernel[(1,)](
        norm, totals, rows, distance, LAST=LAST, num_warps=1, enable_fp_fusion=False
    )
    return norm


def clip_coefficient(norm: Tensor, max_norm: float, scale: Tensor | None) -> Tensor:
    """Launch the kernel."""
    coefficient = norm.new_empty(())
    clip_coefficient_kernel[(1,)](
        coefficient,
        norm,
        norm if scale is None else scale,
        float(max_norm),
        SCALED=scale is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return coefficient
