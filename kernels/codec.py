"""Encodes flat tensors for slow links, and sums what ranks encoded.

Contracts: `encode_` and `decode_sum_` in `poplar.ops`. The format: `csrc/include/poplar/codec.h`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from poplar.ops.codec import encoded_bytes, random_key

from .pack import tile_values, value_table
from .tree import store_block_sums

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""


@triton.jit
def _level(x, GROUPS: tl.constexpr, DISTANCE: tl.constexpr):
    """Replace each two elements of groups at a distance by their sum and their difference."""
    pairs = tl.reshape(x, [GROUPS * 32 // DISTANCE, 2, DISTANCE])
    low, high = tl.split(tl.permute(pairs, [0, 2, 1]))
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, [0, 2, 1]), [GROUPS, 64])


@triton.jit
def _random_words(group, low, high, GROUPS: tl.constexpr):
    """32 words for each group; `group` is the number of the first one in the whole flat tensor."""
    word = group * 32 + tl.reshape(tl.arange(0, GROUPS * 32), [GROUPS, 32])
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    word = (word + low.to(tl.int64) + (word >> 32) * 0x9E3779B9).to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = (word ^ (word >> 15) ^ high) * 0x735A2D97
    return word ^ (word >> 15)


# Keys and numbers differ from call to call; Triton would compile again for multiples of 16 and 1.
@triton.jit(do_not_specialize=["groups", "segments", "first_group", "key_low", "key_high"])
def encode_kernel(
    codes_ptr,
    table_ptr,
    weight,
    groups,
    segments,
    first_group,
    key_low,
    key_high,
    step,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile. `step` is the factor from the largest coefficient to the scale."""
    rows: tl.constexpr = TILE // 64
    size: tl.constexpr = 8 * BITS + 2
    tile = tl.program_id(0).to(tl.int64)
    values, _ = tile_values(table_ptr, tile * TILE, weight, segments, TILE)
    x = tl.reshape(values, [rows, 64])
    x = _level(x, rows, 32)
    x = _level(x, rows, 16)
    x = _level(x, rows, 8)
    x = _level(x, rows, 4)
    x = _level(x, rows, 2)
    x = _level(x, rows, 1)
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    product = tl.where(finite, largest, 0).to(tl.float32, bitcast=True) * step
    scale = (product.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = tl.where(largest == 0, 0, tl.maximum(scale, (127 - 100) << 7))
    divisor = (tl.where(scale == 0, 0x3F80, scale) << 16).to(tl.float32, bitcast=True)
    units = tl.div_rn(tl.full([rows], 32768.0, tl.float32), divisor)
    x = tl.where(finite[:, None], x, 0.0) * tl.where(scale == 0, 0.0, units)[:, None]
    # Adding 1.5 * 2^23 rounds to an integer; 2^18 more is the code of 0 of 4 bits.
    x = (x + (12582912.0 + (262144.0 if BITS == 4 else 0.0))).to(tl.int32, bitcast=True)
    word = _random_words(first_group + tile * rows, key_low, key_high, rows)
    random = tl.join((word & 0x7FFF).to(tl.int32), (word >> 17).to(tl.int32))
    codes = ((x + tl.reshape(random, [rows, 64])) >> 15) & ((1 << BITS) - 1)
    group = tile * rows + tl.arange(0, rows)
    place = codes_ptr + group[:, None] * size
    inside = group < groups
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, [rows, 32, 2]))
        codes = low | (high << 4)
    byte = tl.arange(0, 8 * BITS)
    tl.store(place + byte[None, :], codes.to(tl.uint8), mask=inside[:, None])
    scale = tl.where(finite, scale, 0x7FC0)
    end = codes_ptr + group * size + 8 * BITS
    tl.store(end, (scale & 0xFF).to(tl.uint8), mask=inside)
    tl.store(end + 1, (scale >> 8).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["ranks"])
def decode_kernel(
    out_ptr,
    table_ptr,
    sums_ptr,
    ranks,
    numel,
    BITS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of the sum. The table has the addresses of the ranks' codes."""
    rows: tl.constexpr = TILE // 64
    size: tl.constexpr = 8 * BITS + 2
    tile = tl.program_id(0).to(tl.int64)
    group = tile * rows + tl.arange(0, rows)
    inside = group * 64 < numel
    element = tl.arange(0, 64)
    byte = group[:, None] * size + (element * BITS // 8)[None, :]
    x = tl.zeros([rows, 64], dtype=tl.float32)
    for rank in range(ranks):
        codes_ptr = tl.load(table_ptr + rank).to(tl.pointer_type(tl.uint8))
        codes = tl.load(codes_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
        if BITS == 4:
            codes = (codes >> (element % 2 * 4)[None, :]) & 15
        end = codes_ptr + group * size + 8 * BITS
        low = tl.load(end, mask=inside, other=0).to(tl.int32)
        high = tl.load(end + 1, mask=inside, other=0).to(tl.int32)
        share = ((high << 24) | (low << 16)).to(tl.float32, bitcast=True) * 0.015625
        x += (codes - (1 << (BITS - 1))).to(tl.float32) * share[:, None]
    x = _level(x, rows, 1)
    x = _level(x, rows, 2)
    x = _level(x, rows, 4)
    x = _level(x, rows, 8)
    x = _level(x, rows, 16)
    x = _level(x, rows, 32)
    total = tl.reshape(x, [TILE])
    position = tile * TILE + tl.arange(0, TILE)
    inside_out = position < numel
    if ACCUMULATE:
        total = tl.load(out_ptr + position, mask=inside_out, other=0.0).to(tl.float32) + total
    tl.store(out_ptr + position, total.to(out_ptr.dtype.element_ty), mask=inside_out)
    if SUMS:
        store_block_sums(sums_ptr, tl.where(inside_out, total, 0.0), tile, numel, TILE)


def encode_(
    codes: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[int],
    weight: float,
    bits: int,
    first: int,
    key: int,
) -> None:
    """Launch the kernel."""
    groups = codes.numel() // encoded_bytes(64, bits)
    if groups == 0:
        return
    flat = [tensor.contiguous() for tensor in values]
    table, segments = value_table(flat, offsets, codes.device)
    low, high = (word - (word >> 31 << 32) for word in random_key(key))  # always int32
    encode_kernel[(triton.cdiv(groups * 64, TILE),)](
        codes,
        table,
        weight,
        groups,
        segments,
        first // 64,
        low,
        high,
        (1 + 2**-20) / (2 ** (bits - 1) - 1),
        BITS=bits,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


def decode_sum_(
    out: Tensor,
    received: Sequence[Tensor],
    bits: int,
    accumulate: bool,
    sums: Tensor | None,
) -> None:
    """Launch the kernel."""
    numel = out.numel()
    if numel == 0:
        return
    table = torch.tensor([part.data_ptr() for part in received], dtype=torch.int64, device="cpu")
    decode_kernel[(triton.cdiv(numel, TILE),)](
        out,
        table.to(out.device, non_blocking=True),
        out if sums is None else sums,
        len(received),
        numel,
        BITS=bits,
        ACCUMULATE=accumulate,
        SUMS=sums is not None,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
