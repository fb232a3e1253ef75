"""Placements: how the values of one tensor are divided over ranks.

The gradient of a tensor is placed as the adjoint over all ranks says: that of a replicated tensor
is partial (each rank has its own contribution), that of a partial one is replicated, that of a
sharded one is sharded in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from poplar import _core
from poplar.values.schema import Count, PositiveCount


class Whole(Enum):
    """Placements in which every rank has a tensor of the whole shape."""

    REPLICATED = "replicated"
    PARTIAL = "partial"

    def __repr__(self) -> str:
        return self.name


REPLICATED = Whole.REPLICATED
"""Every rank has the same values."""
PARTIAL = Whole.PARTIAL
"""The sum over ranks is the value."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Each rank has consecutive indices of one dimension; see `bounds`."""

    dim: Count
    """Counted from the first dimension: not negative."""
    unit: PositiveCount = 1
    """Indices that stay together, such as the channels of an attention head."""

    def bounds(self, shape: Sequence[int], ratios: Sequence[int]) -> tuple[int, ...]:
        """`len(ratios) + 1` bounds: rank `r` has indices `bounds[r]` to `bounds[r + 1]` of `dim`.

        Args:
            shape: of the whole tensor.
            ratios: parts of the ranks, as in `cut`.
        """
        return cut(shape[self.dim], ratios, self.unit)


Placement: TypeAlias = Whole | Sharded


def cut(size: int, ratios: Sequence[int], unit: int = 1) -> tuple[int, ...]:
    """`len(ratios) + 1` bounds, first 0, last `size`, of the parts that `part_sizes` gives."""
    return tuple(accumulate(part_sizes(size, ratios, unit), initial=0))


def part_sizes(size: int, ratios: Sequence[int], unit: int = 1) -> tuple[int, ...]:
    """Divide a dimension into one consecutive part per rank.

    Args:
        size: of the dimension; a multiple of `unit`.
        ratios: part of each rank, relative to the others; 0 gives an empty part.
        unit: sizes are multiples of this.

    Returns:
        The size of each rank's part, which may be 0.

    Raises:
        ValueError: a negative ratio, no positive one, or a size that `unit` does not divide.

    Largest-remainder rounding: a part differs by less than `unit` from its exact size. Of equal
    remainders, the first ranks are rounded up.
    """
    if sum(ratios) <= 0 or min(ratios) < 0:
        raise ValueError(f"ratios must be at least 0 and one of them above 0, got {tuple(ratios)}")
    if unit < 1 or size < 0 or size % unit:
        raise ValueError(f"a dimension of size {size} cannot be cut at multiples of {unit}")
    return tuple(unit * count for count in _core.apportion(size // unit, ratios))


def local_shape(
    placement: Placement, shape: Sequence[int], ratios: Sequence[int], rank: int
) -> tuple[int, ...]:
    """The shape of a rank's part of a tensor."""
    if not isinstance(placement, Sharded):
        return tuple(shape)
    dim = placement.dim
    size = part_sizes(shape[dim], ratios, placement.unit)[rank]
    return (*shape[:dim], size, *shape[dim + 1 :])
