"""Sums of squares of 64-element blocks. Contract: `block_sums_of_squares` in `poplar.ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree import store_block_sums

TILE = 2048
"""Elements per program: sixteen for each thread of four warps. Not tuned yet."""


@triton.jit
def block_sums_kernel(sums_ptr, flat_ptr, numel, TILE: tl.constexpr):
    """One tile."""
    tile = tl.program_id(0).to(tl.int64)
    position = tile * TILE + tl.arange(0, TILE)
    values = tl.load(flat_ptr + position, mask=position < numel, other=0.0).to(tl.float32)
    store_block_sums(sums_ptr, values, tile, numel, TILE)


def block_sums_of_squares(flat: Tensor) -> Tensor:
    """Launch the kernel."""
    numel = flat.numel()
    sums = torch.empty(triton.cdiv(numel, 64), dtype=torch.float32, device=flat.device)
    if numel:
        block_sums_kernel[(triton.cdiv(numel, TILE),)](
            sums, flat, numel, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
    return sums
