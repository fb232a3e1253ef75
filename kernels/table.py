"""A table of many tensors for one launch: each program works on one tile of one tensor.

A row begins with the number of the tensor's first tile. Numbers beside addresses and sizes are
fp32, stored as their bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_of(table_ptr, rows, tile, COLUMNS: tl.constexpr):
    """The address of the row whose tensor contains the tile: the last one that begins before it."""
    low = tl.full([], 0, tl.int32)
    high = low + rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(table_ptr + middle * COLUMNS) <= tile:
            low = middle
        else:
            high = middle - 1
    return table_ptr + low * COLUMNS


@triton.jit
def number(place):
    """An fp32 of a row."""
    return tl.load(place).to(tl.int32).to(tl.float32, bitcast=True)


def first_tiles(numels: Sequence[int], tile: int) -> tuple[list[int], int]:
    """The number of each tensor's first tile, and the number of all tiles."""
    firsts, end = [], 0
    for numel in numels:
        firsts.append(end)
        end += triton.cdiv(numel, tile)
    return firsts, end


def table_of(
    rows: Sequence[Sequence[int]], device: torch.device, numbers: Sequence[Sequence[float]] = ()
) -> Tensor:
    """The table on the device: integers first, then the bits of the numbers."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if numbers:
        floats = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        table = torch.cat([table, floats.view(torch.int32).long()], 1)
    return table.to(device, non_blocking=True)
