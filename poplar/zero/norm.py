"""Norms of sharded gradients whose bits don't depend on the shards, without a wait for the device.

[Note: exact sums]
A sum of floats depends on the order, and shards change the order. So sums of squares are taken in
two steps: in fp32 over aligned blocks of 64 elements, which no shard boundary cuts, and from there
on exactly, as integers (`ops.exact_sum_`). Those add up over units and ranks, in any order, to the
same bits; only the last step, to one number, rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poplar import ops

_LOWEST = -149
"""The exponent of the smallest fp32, in units of which the first word of an exact sum counts."""
_BIAS, _FRACTION = 1023, 52
"""Of a float64."""


def exact_total(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The exact sum of fp32 tensors: `ops.EXACT_WORDS` of int64. Those of several ranks add up."""
    total = torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=device)
    for part in parts:
        ops.exact_sum_(total, part)
    return total


def rounded(total: Tensor) -> Tensor:
    """An exact sum of values >= 0 as one float64; infinite if a value was not finite.

    The order of its few additions is fixed, so it has the same bits on every device.
    """
    words = torch.arange(ops.EXACT_WORDS, device=total.device)
    units = ((ops.EXACT_BITS * words + (_LOWEST + _BIAS)) << _FRACTION).view(torch.float64)
    carries = torch.cat([total.new_zeros(1), total[:-1] >> ops.EXACT_BITS])
    values = ((total & ((1 << ops.EXACT_BITS) - 1)) + carries).double() * units  # both exact
    values[-1] = 0.0
    while values.numel() > 1:
        values = values[: values.numel() // 2] + values[values.numel() // 2 :]
    return torch.where(total[-1] == 0, values[0], math.inf)


def largest(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Largest absolute value as one float64; 0 where there is nothing."""
    values = [part.abs().max().double() for part in parts if part.numel()]
    return torch.stack(values).max() if values else _zero(device)


def power_sum(parts: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Sum of `|x| ** power` as one float64; its bits may depend on the shards."""
    values = [part.double().abs().pow(power).sum() for part in parts if part.numel()]
    return torch.stack(values).sum() if values else _zero(device)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
