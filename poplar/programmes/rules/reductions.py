"""Operators that reduce dimensions, or mix the indices of some dimensions and no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import LocalCall, Part
from poplar.programmes.rules.pattern import Dims, Pattern, elementwise, named
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all, counted_from_first

_SUM_OF_MEAN = {
    "aten.mean.default": "aten.sum.default",
    "aten.mean.dim": "aten.sum.dim_IntList",
}
"""Operators with the same arguments."""


def _reduced_dims(node: Node, types: Types, position: int) -> list[int]:
    count = len(types[0].shape)
    dims = argument(node, position, "dim")
    given = [dims] if isinstance(dims, int) else list(dims or range(count))
    return [counted_from_first(dim, count) for dim in given]


def _after(dims: Dims, reduced: Sequence[int], node: Node) -> Dims:
    """Axes of the output; reduced dimensions are gone, or have size 1 and no axes."""
    if len(node.output.shape) == len(dims):
        return tuple(() if dim in reduced else axes for dim, axes in enumerate(dims))
    return tuple(axes for dim, axes in enumerate(dims) if dim not in reduced)


def _reduction(node: Node, types: Types, *, is_sum: bool, position: int = 1) -> Pattern:
    if len({kind.shape for kind in types}) > 1:
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    reduced = _reduced_dims(node, types, position)
    axes = frozenset(axis for dim in reduced for axis in dims[dim])
    return Pattern(
        sizes=sizes,
        inputs=(dims,) * len(types),
        output=_after(dims, reduced, node),
        summed=axes if is_sum else frozenset(),
        whole=frozenset() if is_sum else axes,
        linear_in=(frozenset({0}),) if is_sum else (),
        flops=types[0].numel,
    )


def summation(node: Node, types: Types) -> Pattern:
    """Sums and means: partial if a summed dimension is divided."""
    return _reduction(node, types, is_sum=True)


def selection(node: Node, types: Types) -> Pattern:
    """Maxima and other reductions that need all indices of the reduced dimensions."""
    return _reduction(node, types, is_sum=False)


def selection_over(position: int) -> Rule:
    """The rule of norms and similarities; `position`: of the dimensions in the arguments."""

    def pattern(node: Node, types: Types) -> Pattern:
        return _reduction(node, types, is_sum=False, position=position)

    return Rule(pattern)


def extremum(node: Node, types: Types) -> Pattern:
    """`max` and `min`: of all elements, along a dimension, or of two tensors at each index."""
    if node.operator.endswith(".other"):
        return elementwise(node.output, types, linear_in=(), flops=node.output.numel)
    return selection(node, types)


def _mean_as_sum(call: LocalCall, part: Part) -> LocalCall:
    """A partial mean: the sum, divided by the number of elements on all ranks."""
    if not part.is_summed:
        return call
    count = part.types[0].numel // part.node.output.numel
    return replace(call, operator=_SUM_OF_MEAN[call.operator], scale=1.0 / count)


def along_dim(position: int, default: int | None = None) -> Rule:
    """The rule of operators that mix indices of one dimension, such as softmax and `topk`.

    Args:
        position: of the dimension in the arguments.
        default: the dimension, if it is not given.
    """

    def pattern(node: Node, types: Types) -> Pattern:
        dim = argument(node, position, "dim", default)
        shape = types[0].shape
        if dim is None or not shape:
            return computed_by_all(node, types)
        sizes: dict[str, int] = {}
        dims = named("d", shape, sizes)
        mixed = counted_from_first(dim, len(shape))
        sizes["mixed"] = node.output.shape[mixed]
        output = (*dims[:mixed], ("mixed",), *dims[mixed + 1 :])
        return Pattern(
            sizes=sizes,
            inputs=(dims,),
            output=output,
            whole=frozenset({"mixed", *dims[mixed]}),
            flops=types[0].numel,
        )

    return Rule(pattern)


def over_last_dims(count: int | None = None, *, kept_dims: int = 0) -> Rule:
    """The rule of operators that mix the last dimensions: norms, pooling, triangles.

    Other tensors that are read, such as a norm's weight, are whole.

    Args:
        count: of the dimensions; None: as many as the second argument, a shape, has.
        kept_dims: number of first dimensions that are not mixed, instead of `count`.
    """

    def pattern(node: Node, types: Types) -> Pattern:
        shape = types[0].shape
        mixed = len(node.arguments[1]) if count is None and not kept_dims else count
        kept = kept_dims or len(shape) - (mixed or 0)
        sizes: dict[str, int] = {}
        outer = named("d", shape[:kept], sizes)
        mixed_sizes: dict[str, int] = {}
        inputs: list[Dims] = [(*outer, *named("in", shape[kept:], mixed_sizes))]
        for index, kind in enumerate(types[1:]):
            inputs.append(named(f"other{index}_", kind.shape, mixed_sizes))
        output = (*outer, *named("out", node.output.shape[kept:], mixed_sizes))
        return Pattern(
            sizes={**sizes, **mixed_sizes},
            inputs=tuple(inputs),
            output=output,
            whole=frozenset(mixed_sizes),
            flops=float(max(types[0].numel, math.prod(node.output.shape))),
        )

    return Rule(pattern)


def padded(node: Node, types: Types) -> Pattern:
    """Padding: the second argument has two numbers for each of the last dimensions."""
    return over_last_dims(len(node.arguments[1]) // 2).pattern(node, types)


SUM = Rule(summation)
MEAN = Rule(summation, _mean_as_sum)
SELECTION = Rule(selection)
EXTREMUM = Rule(extremum)
PADDED = Rule(padded)
