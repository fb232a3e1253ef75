"""The fixed tree that adds a block of 64 squares: see `ops.block_sums_of_squares`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_sums(values, BLOCKS: tl.constexpr):
    """Sums of squares of `BLOCKS` times 64 fp32 values; each level adds the two halves."""
    sums = tl.reshape(values * values, [BLOCKS, 64])
    sums = tl.sum(tl.reshape(sums, [BLOCKS, 2, 32]), axis=1)
    sums = tl.sum(tl.reshape(sums, [BLOCKS, 2, 16]), axis=1)
    sums = tl.sum(tl.reshape(sums, [BLOCKS, 2, 8]), axis=1)
    sums = tl.sum(tl.reshape(sums, [BLOCKS, 2, 4]), axis=1)
    sums = tl.sum(tl.reshape(sums, [BLOCKS, 2, 2]), axis=1)
    return tl.sum(sums, axis=1)


@triton.jit
def store_block_sums(sums_ptr, values, tile, numel, TILE: tl.constexpr):
    """Store the block sums of a tile; values past `numel` must be zeros."""
    block = tile * (TILE // 64) + tl.arange(0, TILE // 64)
    tl.store(sums_ptr + block, block_sums(values, TILE // 64), mask=block * 64 < numel)
