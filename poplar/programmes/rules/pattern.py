"""Patterns: which dimensions of an operator's inputs and output go together.

Each dimension is a product of axes, the outermost first. A matrix product of `[rows, inner]` and
`[inner, columns]` has the axes rows, inner and columns; `view` from `[batch, tokens, 64]` to
`[batch, tokens, 4, 16]` has the axes batch, tokens, heads (4) and channels (16), and the dimension
of 64 is heads times channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from poplar.programmes.graph.graph import TensorType

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""The axes of each dimension of a tensor. A dimension of size 1 may have none."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The axes of one operator.

    An operator is divided along an axis by giving each rank a part of its indices. The result is
    sharded if the axis is one of the output's, partial if the operator sums over it.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    """The axes of each tensor that the operator reads, in the order of its arguments."""
    output: Dims
    """The axes of the output; all outputs have the same ones."""
    summed: frozenset[str] = frozenset()
    """Axes over which the output is a sum."""
    whole: frozenset[str] = frozenset()
    """Axes of which every rank needs all indices."""
    linear_in: tuple[frozenset[int], ...] = ()
    """Sets of inputs in which the operator is linear: with partial values in all inputs of a set,
    and replicated ones in the others, the output is partial."""
    unread: frozenset[int] = frozenset()
    """Inputs of which only the element type and device matter."""
    flops: float
    """Operations of the forward pass, on the whole tensors."""

    def __post_init__(self) -> None:
        for dims in (*self.inputs, self.output):
            for axis in (axis for dim in dims for axis in dim):
                if axis not in self.sizes:
                    raise ValueError(f"Pattern: axis {axis!r} has no size")

    def divisible_axes(self) -> Iterator[str]:
        """Axes along which the operator can be divided: outermost in each of their dimensions."""
        tensors = (*self.inputs, self.output)
        inner = {axis for dims in tensors for dim in dims for axis in dim[1:]}
        for axis in self.sizes:
            is_used = axis in self.summed or any(axis in dim for dim in self.output)
            if is_used and axis not in inner and axis not in self.whole:
                yield axis

    def inner_size(self, dims: Dims, dim: int) -> int:
        """Indices of a dimension for one index of its outermost axis."""
        return math.prod(self.sizes[axis] for axis in dims[dim][1:])

    def dim_of(self, dims: Dims, axis: str) -> int | None:
        """The dimension whose outermost axis this is."""
        found = [dim for dim, axes in enumerate(dims) if axes[:1] == (axis,)]
        return found[0] if found else None


def named(prefix: str, shape: Sequence[int], sizes: dict[str, int]) -> Dims:
    """One axis for each dimension of a tensor, entered in `sizes`."""
    names = tuple(f"{prefix}{dim}" for dim in range(len(shape)))
    sizes.update(zip(names, shape, strict=True))
    return tuple((name,) for name in names)


def aligned(dims: Dims, whole_shape: Sequence[int], shape: Sequence[int]) -> Dims:
    """The axes of a tensor that is broadcast to another one, whose axes and shape are given."""
    first = len(whole_shape) - len(shape)
    return tuple(
        dims[first + dim] if size == whole_shape[first + dim] else ()
        for dim, size in enumerate(shape)
    )


def elementwise(
    output: TensorType,
    types: Sequence[TensorType],
    *,
    linear_in: tuple[frozenset[int], ...],
    flops: float,
) -> Pattern:
    """The pattern of an operator whose inputs are all broadcast to its output."""
    sizes: dict[str, int] = {}
    dims = named("d", output.shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=tuple(aligned(dims, output.shape, kind.shape) for kind in types),
        output=dims,
        linear_in=linear_in,
        flops=flops,
    )


def without(dims: Dims, removed: Sequence[int]) -> Dims:
    """The axes without those of some dimensions."""
    return tuple(axes for dim, axes in enumerate(dims) if dim not in removed)
