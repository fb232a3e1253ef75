"""AdamW on many flat shards; everything is read and written once.

Contract: `adamw_` in `poplar.ops`. The order of operations is that of
`csrc/include/poplar/adamw.h`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .table import first_tiles, number, row_of, table_of

TILE = 1024
"""Elements per program: eight for each thread of four warps. Not tuned yet."""
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = -1
"""The dtype of a shard without low-precision values."""
_INTEGERS = 8
_NUMBERS = 9
COLUMNS = _INTEGERS + _NUMBERS
"""A row: first tile, elements, addresses (values, gradient, mean, square_mean, rounded), dtype of
`rounded`; then the numbers of `_numbers`."""


@triton.jit
def _pointer(row, column, offset, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Places in a tensor. `ALIGNED`: a multiple of 16 bytes, so accesses are vectorized."""
    place = tl.load(row + column).to(tl.pointer_type(TYPE)) + offset
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _value_behind(values, low):
    """The values behind a low-precision copy: the copy itself where it was written since."""
    return tl.where(values.to(low.dtype) == low, values, low.to(tl.float32))


@triton.jit
def _update(row, offset, inside, scale, ALIGNED: tl.constexpr):
    """One tile; `inside` masks its elements, or is None if all exist."""
    numbers = row + 8
    factor = number(numbers) * scale
    keep = number(numbers + 1)
    keeps_mean = number(numbers + 2) != 0.0
    values_ptr = _pointer(row, 2, offset, tl.float32, ALIGNED)
    mean_ptr = _pointer(row, 4, offset, tl.float32, ALIGNED)
    square_ptr = _pointer(row, 5, offset, tl.float32, ALIGNED)
    scaled = tl.load(_pointer(row, 3, offset, tl.float32, ALIGNED), mask=inside) * factor
    mean = tl.load(mean_ptr, mask=inside)
    change = (scaled - mean) * number(numbers + 3)
    mean = tl.where(keeps_mean, mean, scaled) + change
    square = tl.load(square_ptr, mask=inside)
    square = square * number(numbers + 4) + (scaled * scaled) * number(numbers + 5)
    root = tl.sqrt_rn(square) * number(numbers + 6) + number(numbers + 7)
    moved = number(numbers + 8) * tl.div_rn(mean, root)
    tl.store(mean_ptr, mean, mask=inside)
    tl.store(square_ptr, square, mask=inside)
    values = tl.load(values_ptr, mask=inside)
    dtype = tl.load(row + 7)
    if dtype == 0:
        low_ptr = _pointer(row, 6, offset, tl.float32, ALIGNED)
        values = _value_behind(values, tl.load(low_ptr, mask=inside)) * keep - moved
        tl.store(low_ptr, values, mask=inside)
    elif dtype == 1:
        low_ptr = _pointer(row, 6, offset, tl.bfloat16, ALIGNED)
        values = _value_behind(values, tl.load(low_ptr, mask=inside)) * keep - moved
        tl.store(low_ptr, values.to(tl.bfloat16), mask=inside)
    elif dtype == 2:
        low_ptr = _pointer(row, 6, offset, tl.float16, ALIGNED)
        values = _value_behind(values, tl.load(low_ptr, mask=inside)) * keep - moved
        tl.store(low_ptr, values.to(tl.float16), mask=inside)
    else:
        values = values * keep - moved
    tl.store(values_ptr, values, mask=inside)


@triton.jit
def adamw_kernel(
    table_ptr,
    scale_ptr,
    found_inf_ptr,
    rows,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one shard. `ALIGNED`: all tensors begin at multiples of 16 bytes."""
    tile = tl.program_id(0).to(tl.int64)
    row = row_of(table_ptr, rows, tile, COLUMNS)
    begin = (tile - tl.load(row)) * TILE
    left = tl.load(row + 1) - begin
    if CHECKED:
        left = tl.where(tl.load(found_inf_ptr) == 0.0, left, 0)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
    places = tl.arange(0, TILE)
    if left >= TILE:
        _update(row, begin + places, None, scale, ALIGNED)
    else:
        _update(row, begin + places, places < left, scale, False)


def adamw_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    square_means: Sequence[Tensor],
    rounded: Sequence[Tensor],
    rules: Sequence[float],
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Launch the kernel."""
    shards = list(zip(values, gradients, means, square_means, rounded, strict=True))
    firsts, tiles = first_tiles([shard[0].numel() for shard in shards], TILE)
    if not tiles:
        return
    rows, numbers = [], []
    for i, (first, shard) in enumerate(zip(firsts, shards, strict=True)):
        if not shard[0].numel():
            continue
        low = shard[-1]
        addresses = [tensor.data_ptr() for tensor in shard]
        code = _CODES[low.dtype] if low.numel() else _ABSENT
        rows.append((first, shard[0].numel(), *addresses, code))
        numbers.append(_numbers(*rules[7 * i : 7 * i + 7]))
    table = table_of(rows, values[0].device, numbers)
    adamw_kernel[(tiles,)](
        table,
        values[0] if scale is None else scale,
        values[0] if found_inf is None else found_inf,
        len(rows),
        SCALED=scale is not None,
        CHECKED=found_inf is not None,
        ALIGNED=all(address % 16 == 0 for row in rows for address in row[2:7]),
        COLUMNS=COLUMNS,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _numbers(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    maximize: float,
) -> tuple[float, ...]:
    """The constants of a step, computed in double and rounded to fp32 by the table."""
    keeps_mean = 1.0 - beta1 < 0.5
    return (
        -1.0 if maximize else 1.0,
        1.0 - lr * weight_decay,
        float(keeps_mean),
        1.0 - beta1 if keeps_mean else -beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
    )
