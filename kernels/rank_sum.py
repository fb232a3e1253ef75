"""Sums the ranks' parts in rank order. Contract: `rank_sum_` in `poplar.ops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tree import store_block_sums

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""


@triton.jit
def _part(address, position, inside, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 values of one rank. `ALIGNED`: every part begins at a multiple of 16 bytes."""
    place = address.to(tl.pointer_type(TYPE)) + position
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rank_sum_kernel(
    out_ptr,
    first_ptr,
    table_ptr,
    sums_ptr,
    ranks,
    numel,
    ACCUMULATE: tl.constexpr,
    SUMS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of the shard. The table has the addresses; `first_ptr` gives their dtype."""
    tile = tl.program_id(0).to(tl.int64)
    position = tile * TILE + tl.arange(0, TILE)
    inside = position < numel
    kind: tl.constexpr = first_ptr.dtype.element_ty
    total = _part(tl.load(table_ptr), position, inside, kind, ALIGNED)
    for rank in range(1, ranks):
        total += _part(tl.load(table_ptr + rank), position, inside, kind, ALIGNED)
    if ACCUMULATE:
        total = tl.load(out_ptr + position, mask=inside, other=0.0) + total
    tl.store(out_ptr + position, total, mask=inside)
    if SUMS:
        store_block_sums(sums_ptr, total, tile, numel, TILE)


def rank_sum_(
    out: Tensor, received: Sequence[Tensor], accumulate: bool, sums: Tensor | None
) -> None:
    """Launch the kernel."""
    numel = out.numel()
    if numel == 0:
        return
    addresses = [part.data_ptr() for part in received]
    table = torch.tensor(addresses, dtype=torch.int64, device="cpu")
    rank_sum_kernel[(triton.cdiv(numel, TILE),)](
        out,
        received[0],
        table.to(out.device, non_blocking=True),
        out if sums is None else sums,
        len(received),
        numel,
        ACCUMULATE=accumulate,
        SUMS=sums is not None,
        ALIGNED=all(address % 16 == 0 for address in addresses),
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
