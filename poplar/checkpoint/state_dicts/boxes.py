"""A flat range of a tensor as boxes, the parts of a `torch.distributed.checkpoint`.

A box is a contiguous part of the tensor in each dimension. The boxes here are also contiguous in
memory, so each is a plain slice of the flat range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor that is contiguous in each dimension and in row-major order."""

    offsets: tuple[int, ...]
    """By dimension, the first index."""
    sizes: tuple[int, ...]
    start: int
    """Its first element in row-major order."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements `[start, stop)`, in row-major order, of a tensor into boxes.

    Args:
        shape: of the whole tensor, with any number of dimensions; sizes may be 0 or 1.
        start: first element.
        stop: the element after the last.

    Returns:
        In row-major order, at most `2 * len(shape) - 1` boxes (1 for a scalar); none if the range
        is empty.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"[{start}, {stop}) is not a range of the {math.prod(shape)} elements of a tensor of "
            f"shape {tuple(shape)}"
        )
    return _cut(tuple(shape), start, stop, (), 0) if start < stop else []


def _cut(
    shape: tuple[int, ...], start: int, stop: int, index: tuple[int, ...], base: int
) -> list[Box]:
    """Boxes of a range inside the sub-tensor at `index`, whose first element is `base`."""
    ones = (1,) * len(index)
    if not shape:
        return [Box(index, ones, base)]
    inner = shape[1:]
    row = math.prod(inner)
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _cut(
            inner, start - first * row, stop - first * row, (*index, first), base + first * row
        )
    boxes = []
    if start % row:  # the end of the first row
        boxes += _cut(inner, start % row, row, (*index, first), base + first * row)
        first += 1
    whole = stop // row - first
    if whole:
        zeros = (0,) * len(inner)
        boxes.append(Box((*index, first, *zeros), (*ones, whole, *inner), base + first * row))
    if stop % row:  # the start of the last row
        last = stop // row
        boxes += _cut(inner, 0, stop % row, (*index, last), base + last * row)
    return boxes
