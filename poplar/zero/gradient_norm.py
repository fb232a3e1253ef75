"""Norms of sharded gradients whose bits don't depend on the shards, without a wait for the device.

[Note: exact sums]
A sum of floats depends on the order, and shards change the order. So sums of squares are taken in
two steps: in fp32 over aligned blocks of 64 elements, which no shard boundary cuts, and from there
on exactly, as integers (`ops.exact_sum_`). Those add up over units and ranks, in any order, to the
same bits; only the last step, to one number (`ops.exact_norm`), rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar import ops

_AT_ONCE = 1 << 20


def add_squares(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Add sums of squares, fp32, to an exact sum of `ops.EXACT_WORDS`."""
    for part in parts:
        ops.exact_sum_(total, part)


def largest(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest absolute value as one float64; 0 where there is nothing."""
    values = [torch.linalg.vector_norm(part, torch.inf) for part in parts if part.numel()]
    return torch.stack(values).max().double() if values else _zero(device)


def power_sum(parts: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Sum of `|x| ** power` as one float64; its bits may depend on the shards."""
    total = _zero(device)
    for part in parts:
        for piece in part.split(_AT_ONCE):  # float64 of a whole shard would be twice its size
            total += piece.double().abs_().pow_(power).sum()
    return total


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
