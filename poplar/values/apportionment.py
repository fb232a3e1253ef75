"""Whole numbers in proportion to weights: samples of ranks, and elements of shards."""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Cut `total` into integers in proportion to `weights`, by largest remainder.

    Args:
        total: the integer to divide; not negative.
        weights: finite, not negative, not all 0. A weight of 0 gets 0.

    Returns:
        One integer per weight; they sum to `total`, and none is a whole unit off its exact quota.

    Raises:
        ValueError: a weight that is negative or not finite, or none above 0.

    Ties go to the lower index. Computed in integers, so all platforms get the same.
    """
    if not all(0.0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(
            f"weights must be finite and at least 0, and one of them above 0, got {list(weights)}"
        )
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    common = max(denominator for _, denominator in ratios)  # all are powers of 2
    scaled = [numerator * (common // denominator) for numerator, denominator in ratios]
    together = sum(scaled)
    parts = [total * weight // together for weight in scaled]
    by_remainder = sorted(range(len(parts)), key=lambda index: -(total * scaled[index] % together))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
