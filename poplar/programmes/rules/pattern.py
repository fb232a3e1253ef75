"""Patterns: which dimensions of an operator's inputs and output go together.

Each dimension is a product of axes, the outermost first. A matrix product of `[rows, inner]` and
`[inner, columns]` has the axes rows, inner and columns; `view` from `[batch, tokens, 64]` to
`[batch, tokens, 4, 16]` has the axes batch, tokens, heads (4) and channels (16), and the dimension
of 64 is heads times channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from poplar.programmes.graph.graph import Node, TensorType

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""The axes of each dimension of a tensor. A dimension of size 1 may have none."""
Types: TypeAlias = tuple[TensorType, ...]
Label: TypeAlias = str | int | tuple[str, ...] | None
"""One dimension of a tensor in a rule: dimensions with the same label are one axis; a tuple is a
product of axes; every rank needs all indices of a dimension without a label."""


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
    flops: float
    """Operations of the forward pass, on the whole tensors."""

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


def mapped(
    node: Node,
    types: Types,
    inputs: Sequence[Sequence[Label]],
    output: Sequence[Label],
    *,
    sizes: Mapping[str, int] | None = None,
    whole: Iterable[str] = (),
    linear_in: Iterable[Collection[int]] = (),
    flops: float | None = None,
    broadcasts: bool = False,
) -> Pattern:
    """The pattern of a call whose dimensions have these labels. A label of several sizes is none.

    The operator sums over what the inputs have and the output does not.

    Args:
        node: the call.
        types: of its inputs.
        inputs: labels of the dimensions of each input.
        output: labels of the dimensions of the output.
        sizes: of axes that are only in products.
        whole, linear_in: as in `Pattern`.
        flops: operations of the forward pass. None: one for each element of the largest tensor.
        broadcasts: a dimension of size 1 whose label has another size elsewhere is repeated.
    """
    tensors = list(zip((*inputs, output), (*types, node.output), strict=True))
    found: dict[Label, set[int]] = {}
    for labels, kind in tensors:
        for label, size in zip(labels, kind.shape, strict=True):
            found.setdefault(label, set()).add(size)
    known = dict(sizes or {})
    alone: set[str] = set()

    def axes_of(label: Label, size: int) -> tuple[str, ...]:
        if isinstance(label, tuple):
            return () if size == 1 else label
        of_label = found[label] - {1} if broadcasts else found[label]
        if size == 1 and label is not None and len(of_label) == 1 and 1 not in of_label:
            return ()
        name = str(label)
        if label is None or len(of_label) > 1:
            name = f"alone{len(alone)}"
            alone.add(name)
        known[name] = size
        return (name,)

    *read, computed = [tuple(map(axes_of, labels, kind.shape)) for labels, kind in tensors]
    whole = alone.union(whole)
    missing = {axis for dims in read for dim in dims for axis in dim}.difference(whole, *computed)
    numels = (kind.numel for kind in (*types, node.output))
    return Pattern(
        sizes=known,
        inputs=tuple(read),
        output=computed,
        summed=frozenset(missing),
        whole=frozenset(whole),
        linear_in=tuple(map(frozenset, linear_in)),
        flops=float(max(numels) if flops is None else flops),
    )


def computed_by_all(node: Node, types: Types) -> Pattern:
    """The pattern of an operator without a rule: every rank needs all and computes all."""
    inputs = [[None] * len(kind.shape) for kind in types]
    return mapped(node, types, inputs, [None] * len(node.output.shape))
