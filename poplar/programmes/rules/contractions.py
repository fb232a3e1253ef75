"""Products that sum over an axis: linear layers, matrix products, `einsum`, convolutions."""

from __future__ import annotations

import math
from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import bias_once
from poplar.programmes.rules.pattern import Dims, Pattern, aligned, named
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all


def _linear_in_each(types: Types, *, has_bias: bool) -> tuple[frozenset[int], ...]:
    return () if has_bias else tuple(frozenset({index}) for index in range(len(types)))


def linear(node: Node, types: Types) -> Pattern:
    """`[..., inner]` and `[columns, inner]` to `[..., columns]`, and a bias."""
    sizes = {"columns": types[1].shape[0], "inner": types[1].shape[1]}
    rows = named("row", types[0].shape[:-1], sizes)
    has_bias = len(types) > 2
    bias: tuple[Dims, ...] = ((("columns",),),) if has_bias else ()
    return Pattern(
        sizes=sizes,
        inputs=((*rows, ("inner",)), (("columns",), ("inner",)), *bias),
        output=(*rows, ("columns",)),
        summed=frozenset({"inner"}),
        linear_in=_linear_in_each(types, has_bias=has_bias),
        flops=2.0 * math.prod(sizes.values()),
    )


def matmul(node: Node, types: Types) -> Pattern:
    """`[..., rows, inner]` and `[..., inner, columns]`; batch dimensions are broadcast."""
    left, right = types[0].shape, types[1].shape
    if min(len(left), len(right)) < 2:
        return _with_vector(node, types)
    sizes = {"rows": left[-2], "inner": left[-1], "columns": right[-1]}
    shape = node.output.shape[:-2]
    batch = named("batch", shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=(
            (*aligned(batch, shape, left[:-2]), ("rows",), ("inner",)),
            (*aligned(batch, shape, right[:-2]), ("inner",), ("columns",)),
        ),
        output=(*batch, ("rows",), ("columns",)),
        summed=frozenset({"inner"}),
        linear_in=_linear_in_each(types, has_bias=False),
        flops=2.0 * math.prod(sizes.values()),
    )


def _with_vector(node: Node, types: Types) -> Pattern:
    """A vector times a matrix, a matrix times a vector, or two vectors."""
    left, right = types[0].shape, types[1].shape
    if len(left) > 2 or len(right) > 2:
        return computed_by_all(node, types)
    sizes = {"inner": left[-1]}
    rows = named("row", left[:-1], sizes)
    columns = named("column", right[1:], sizes)
    return Pattern(
        sizes=sizes,
        inputs=((*rows, ("inner",)), (("inner",), *columns)),
        output=(*rows, *columns),
        summed=frozenset({"inner"}),
        linear_in=_linear_in_each(types, has_bias=False),
        flops=2.0 * math.prod(sizes.values()),
    )


def added_product(node: Node, types: Types) -> Pattern:
    """`addmm` and `baddbmm`: a tensor that is broadcast to the product, and the product's two."""
    product = matmul(node, types[1:])
    added = aligned(product.output, node.output.shape, types[0].shape)
    return replace(
        product,
        inputs=(added, *product.inputs),
        linear_in=(frozenset({0, 1}), frozenset({0, 2})),
    )


def outer(node: Node, types: Types) -> Pattern:
    """`[rows]` and `[columns]` to `[rows, columns]`."""
    sizes = {"rows": types[0].shape[0], "columns": types[1].shape[0]}
    return Pattern(
        sizes=sizes,
        inputs=((("rows",),), (("columns",),)),
        output=(("rows",), ("columns",)),
        linear_in=_linear_in_each(types, has_bias=False),
        flops=float(math.prod(sizes.values())),
    )


def einsum(node: Node, types: Types) -> Pattern:
    """One axis per letter. Equations with `...` or a letter twice are computed by all ranks."""
    equation = str(node.arguments[0]).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    is_plain = arrow and "." not in equation
    if not is_plain or any(len(set(term)) < len(term) for term in terms):
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    for term, kind in zip(terms, types, strict=True):
        for letter, size in zip(term, kind.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    inputs = tuple(
        tuple(
            (letter,) if size == sizes[letter] else ()
            for letter, size in zip(term, kind.shape, strict=True)
        )
        for term, kind in zip(terms, types, strict=True)
    )
    return Pattern(
        sizes=sizes,
        inputs=inputs,
        output=tuple((letter,) for letter in result),
        summed=frozenset(sizes) - set(result),
        linear_in=_linear_in_each(types, has_bias=False),
        flops=2.0 * math.prod(sizes.values()),
    )


def convolution(node: Node, types: Types) -> Pattern:
    """`[samples, before, ...]` and `[channels, before, ...]` to `[samples, channels, ...]`."""
    image, weight, output = types[0].shape, types[1].shape, node.output.shape
    groups = argument(node, 6, "groups", 1)
    if len(image) != len(weight):  # one image without a dimension for samples
        return computed_by_all(node, types)
    sizes = {"samples": image[0], "before": image[1], "channels": output[1]}
    if groups != 1:
        sizes["before_in_group"] = weight[1]
    before = "before" if groups == 1 else "before_in_group"
    pixels = named("pixel", image[2:], sizes)
    window = named("window", weight[2:], sizes)
    placed = named("place", output[2:], sizes)
    has_bias = len(types) > 2
    bias: tuple[Dims, ...] = ((("channels",),),) if has_bias else ()
    whole = {axis for dims in (pixels, window, placed) for axes in dims for axis in axes}
    return Pattern(
        sizes=sizes,
        inputs=(
            (("samples",), ("before",), *pixels),
            (("channels",), (before,), *window),
            *bias,
        ),
        output=(("samples",), ("channels",), *placed),
        summed=frozenset({"before"}) if groups == 1 else frozenset(),
        whole=frozenset(whole | (set() if groups == 1 else {"before", before, "channels"})),
        linear_in=_linear_in_each(types, has_bias=has_bias),
        flops=2.0 * node.output.numel * math.prod(weight[1:]),
    )


LINEAR = Rule(linear, bias_once(2))
MATMUL = Rule(matmul)
ADDED_PRODUCT = Rule(added_product, bias_once(0))
OUTER = Rule(outer)
EINSUM = Rule(einsum)
CONVOLUTION = Rule(convolution, bias_once(2))
