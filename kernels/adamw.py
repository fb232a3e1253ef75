"""AdamW on a flat shard; everything is read and written once. Contract: `adamw_` in `poplar.ops`.

The order of operations is that of `csrc/include/poplar/adamw.h`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""


@triton.jit
def adamw_kernel(
    values_ptr,
    gradient_ptr,
    mean_ptr,
    square_ptr,
    rounded_ptr,
    scale_ptr,
    found_inf_ptr,
    keep,
    mean_factor,
    old_square,
    new_square,
    root_factor,
    eps,
    step_size,
    numel,
    KEEPS_MEAN: tl.constexpr,
    NEGATIVE: tl.constexpr,
    ROUNDS: tl.constexpr,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of the shard."""
    position = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if CHECKED:
        numel = tl.where(tl.load(found_inf_ptr) == 0.0, numel, 0)
    inside = position < numel
    scaled = tl.load(gradient_ptr + position, mask=inside, other=0.0)
    if SCALED:
        scaled = scaled * tl.load(scale_ptr)
    if NEGATIVE:
        scaled = -scaled
    mean = tl.load(mean_ptr + position, mask=inside, other=0.0)
    change = (scaled - mean) * mean_factor
    mean = (mean if KEEPS_MEAN else scaled) + change
    square = tl.load(square_ptr + position, mask=inside, other=0.0)
    square = square * old_square + (scaled * scaled) * new_square
    root = tl.sqrt_rn(square) * root_factor + eps
    moved = step_size * tl.div_rn(mean, root)
    values = tl.load(values_ptr + position, mask=inside, other=0.0) * keep - moved
    tl.store(mean_ptr + position, mean, mask=inside)
    tl.store(square_ptr + position, square, mask=inside)
    tl.store(values_ptr + position, values, mask=inside)
    if ROUNDS:
        tl.store(rounded_ptr + position, values.to(rounded_ptr.dtype.element_ty), mask=inside)


def adamw_(
    values: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square_mean: Tensor,
    rounded: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    maximize: bool,
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Launch the kernel; arguments must have been checked."""
    numel = values.numel()
    if numel == 0:
        return
    keeps_mean = 1.0 - beta1 < 0.5
    adamw_kernel[(triton.cdiv(numel, TILE),)](
        values,
        gradient,
        mean,
        square_mean,
        values if rounded is None else rounded,
        values if scale is None else scale,
        values if found_inf is None else found_inf,
        1.0 - lr * weight_decay,
        1.0 - beta1 if keeps_mean else -beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        numel,
        KEEPS_MEAN=keeps_mean,
        NEGATIVE=maximize,
        ROUNDS=rounded is not None,
        SCALED=scale is not None,
        CHECKED=found_inf is not None,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
