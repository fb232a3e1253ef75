"""Norms of sharded gradients whose bits do not depend on the shards.

[Note: exact sums]
A floating-point sum depends on its order, and shards change the order. So sums of squares are taken
in fp32 over aligned blocks of 64 elements, which no shard boundary splits, and then added exactly,
as integers (`ops.exact_sum_`). Integer sums over units and ranks have the same bits in any order.
Only the conversion to one number (`ops.exact_norm`) rounds. The host does not synchronize.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20


def largest(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest absolute value as one float64; 0 if there are no values."""
    values = [torch.linalg.vector_norm(part, torch.inf) for part in parts if part.numel()]
    return torch.stack(values).max().double() if values else _zero(device)


def power_sum(parts: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Sum of `|x| ** power` as one float64. Its bits may depend on the shards."""
    total = _zero(device)
    for part in parts:
        for chunk in part.split(_CHUNK_ELEMENTS):  # a float64 copy of a whole shard would double it
            total += chunk.double().abs_().pow_(power).sum()
    return total


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
