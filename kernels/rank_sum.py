"""What every rank sent, summed in rank order. Contract: `rank_sum_` in `poplar.ops`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .tree import store_block_sums

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""


@triton.jit
def rank_sum_kernel(
    out_ptr,
    received_ptr,
    sums_ptr,
    distance,
    ranks,
    numel,
    ACCUMULATE: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of the shard; ranks' parts begin `distance` elements apart."""
    tile = tl.program_id(0).to(tl.int64)
    position = tile * TILE + tl.arange(0, TILE)
    inside = position < numel
    part_ptr = received_ptr + position
    total = tl.load(part_ptr, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, ranks):
        part_ptr += distance
        total += tl.load(part_ptr, mask=inside, other=0.0).to(tl.float32)
    if ACCUMULATE:
        total = tl.load(out_ptr + position, mask=inside, other=0.0) + total
    tl.store(out_ptr + position, total, mask=inside)
    if SUMS:
        store_block_sums(sums_ptr, total, tile, numel, TILE)


def rank_sum_(
    out: Tensor, received: Sequence[Tensor], accumulate: bool, sums: Tensor | None
) -> None:
    """Launch; arguments were checked."""
    numel = out.numel()
    if numel == 0:
        return
    starts = [part.data_ptr() // part.element_size() for part in received]
    steps = {after - before for before, after in itertools.pairwise(starts)} or {0}
    if len(steps) > 1:
        raise RuntimeError(
            "poplar::rank_sum_: on CUDA all parts must be slices of one tensor at equal distances"
        )
    rank_sum_kernel[(triton.cdiv(numel, TILE),)](
        out,
        received[0],
        out if sums is None else sums,
        steps.pop(),
        len(received),
        numel,
        ACCUMULATE=accumulate,
        SUMS=sums is not None,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
