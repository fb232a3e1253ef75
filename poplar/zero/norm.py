"""Norms of sharded gradients whose bits don't depend on the shards.

[Note: exact sums]
A sum of floats depends on the order, and shards change the order. So sums of squares are taken in
two steps: in fp32 over aligned blocks of 64 elements, which no shard boundary cuts, and from there
on exactly. Each block's fp32 is an integer of 24 bits times a power of two; integers with the same
exponent are added in a float64 bin, without rounding up to 2^29 blocks. Bins add up over units and
ranks, in any order, to the same bits; only the last step, bins to one number, rounds, once. (After
the exponent-indexed accumulators of Demmel and Nguyen, "Fast Reproducible Floating-Point
Summation", 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# frexp of the smallest fp32 is 0.5 * 2^-148, of the largest < 1 * 2^128.
_LOWEST = -148
BINS = 128 - _LOWEST + 1
_MANTISSA = 24


def square_bins(parts: Sequence[Tensor]) -> Tensor:
    """Exact sum of block sums of squares, as float64 `[BINS]` on the CPU; NaN in bin 0 if one is
    not finite.

    Args:
        parts: as `ops.block_sums_of_squares` gives them.
    """
    bins = torch.zeros(BINS, dtype=torch.float64)
    for blocks in parts:
        if blocks.numel() == 0:
            continue
        mantissa, exponent = torch.frexp(blocks)
        whole = torch.bincount(
            (exponent - _LOWEST).clamp_(0, BINS - 1),
            weights=torch.ldexp(mantissa.double(), torch.tensor(_MANTISSA)),
            minlength=BINS,
        )
        bins += whole.cpu()
        if not bool(torch.isfinite(blocks).all()):
            bins[0] = math.nan
    return bins


def total_of_bins(bins: Tensor) -> float:
    """The sum that `square_bins` holds, rounded once; infinite if a value was not finite."""
    values = bins.tolist()
    if any(math.isnan(value) or math.isinf(value) for value in values):
        return math.inf
    return math.fsum(
        math.ldexp(value, place + _LOWEST - _MANTISSA) for place, value in enumerate(values)
    )


def largest(parts: Sequence[Tensor]) -> float:
    """Largest absolute value; 0 where there is nothing."""
    return max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)


def power_sum(parts: Sequence[Tensor], power: float) -> float:
    """Sum of `|x| ** power` in float64; its bits may depend on the shards, unlike `square_bins`."""
    return math.fsum(float(part.double().abs().pow(power).sum()) for part in parts if part.numel())
