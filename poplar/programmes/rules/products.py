"""Products that sum over an axis, as equations: linear layers, matrix products, lookups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from poplar.programmes.graph.graph import Node, Reference
from poplar.programmes.rules.local_call import (
    EMBEDDING_PART,
    GROUPED_MM_PART,
    WITH_ZEROS,
    Localize,
    Part,
    Rule,
    argument,
)
from poplar.programmes.rules.pattern import Label, Pattern, Types, computed_by_all, mapped

Equation = str | Callable[[Node, Types], str]
"""Such as `rows inner, inner columns -> rows columns`. `*name` stands for the dimensions that no
other word names; `.` and `.*` for dimensions of which every rank needs all indices. An empty
equation: all ranks compute all."""


def product(
    equation: Equation,
    *,
    bias: int | None = None,
    linear: Sequence[int] | None = None,
    localize: Localize | None = None,
) -> Rule:
    """The rule of an operator that sums over the axes that its output does not have.

    Args:
        equation: of the shapes of its tensors; the last ones may be missing.
        bias: position of the tensor that is added to the product.
        linear: tensors in which the operator is linear; None: each but the bias.
        localize: the call of a rank; None: the first rank adds the bias to a partial output.
    """

    def pattern(node: Node, types: Types) -> Pattern:
        text = equation if isinstance(equation, str) else equation(node, types)
        if not text:
            return computed_by_all(node, types)
        terms, _, result = text.partition("->")
        inputs = [
            _labels(term, len(kind.shape))
            for term, kind in zip(terms.split(","), types, strict=False)
        ]
        output = _labels(result, len(node.output.shape))
        factors = {  # of the number of operations for one element
            label or (index, at): kind.shape[at]
            for index, (labels, kind) in enumerate(zip(inputs, types, strict=True))
            for at, label in enumerate(labels)
            if index and (label is None or label not in output)
        }
        added = {bias} if bias is not None and bias < len(types) else set()
        each = [at for at in range(len(types)) if at != bias] if linear is None else linear
        return mapped(
            node,
            types,
            inputs,
            output,
            linear_in=[{at} | added for at in each],
            flops=2.0 * node.output.numel * math.prod(factors.values()),
            broadcasts=True,
        )

    def with_bias_once(call: Node, part: Part) -> Node:
        has_bias = bias is not None and len(part.node.inputs) > 2
        if not has_bias or not part.is_summed or part.start == 0:
            return call
        arguments = (bias, call.operator, *call.arguments)
        return replace(call, operator=WITH_ZEROS, arguments=arguments)

    return Rule(pattern, localize or with_bias_once)


def _labels(term: str, dims: int) -> list[Label]:
    """Labels of a tensor's dimensions; those of `*name` are counted from the last one."""
    words = term.split()
    labels: list[Label] = []
    for word in words:
        name, count = word.strip("*"), dims - len(words) + 1 if "*" in word else 1
        for at in range(count, 0, -1):
            labels.append(None if name == "." else f"{name}{at}" if "*" in word else name)
    return labels[len(labels) - dims :]


def _matmul(node: Node, types: Types) -> str:
    """Matrices and vectors; batch dimensions are broadcast."""
    left, right = (len(kind.shape) > 1 for kind in types)
    first = "*batch rows inner" if left else "inner"
    second = "*batch inner columns" if right else "inner"
    return f"{first}, {second} -> *batch {'rows' * left} {'columns' * right}"


def _einsum(node: Node, types: Types) -> str:
    """One axis per letter; none with `...` or with a letter twice in a tensor."""
    equation = str(node.arguments[0]).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    terms = operands.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in terms):
        return ""
    return ", ".join(map(" ".join, terms)) + " -> " + " ".join(result)


def _convolution(node: Node, types: Types) -> str:
    if len(types[0].shape) != len(types[1].shape):  # one image without a dimension for samples
        return ""
    if argument(node, 6, "groups", 1) != 1:
        return "samples .*, .*, . -> samples .*"
    return "samples before .*, channels before .*, channels -> samples channels .*"


def _embedding(node: Node, types: Types) -> str:
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        return ""
    return "entries columns, *index -> *index columns"


def _embedding_part(call: Node, part: Part) -> Node:
    """Each rank can have some of the entries: the output is then partial."""
    if not part.is_summed:
        return call
    table, indices = call.arguments[:2]
    padding = argument(part.node, 2, "padding_idx", -1)
    arguments = (table, indices, part.start, padding, part.size)
    return replace(call, operator=EMBEDDING_PART, arguments=arguments, keywords={})


def _grouped_product(node: Node, types: Types) -> str:
    """Consecutive rows belong to one expert; the third tensor has the end of the rows of each. A
    rank can have some experts: rows of others are zeros, and the output is partial. Other
    dimensions are whole, because kernels need aligned rows.
    """
    is_plain = [len(kind.shape) for kind in types] == [2, 3, 1]
    return ". ., experts . ., . -> . ." if is_plain else ""


def _grouped_mm_part(call: Node, part: Part) -> Node:
    if not part.is_summed:
        return call
    tensors = [Reference(name) for name in part.node.inputs]
    arguments = (call.operator, *tensors, part.start, part.stop)
    return replace(call, operator=GROUPED_MM_PART, arguments=arguments, keywords={})


def _grouped_pattern(node: Node, types: Types) -> Pattern:
    pattern = product(_grouped_product, linear=(0, 1)).pattern(node, types)
    return replace(pattern, flops=2.0 * node.output.numel * types[0].shape[-1])


def attention(node: Node, types: Types) -> Pattern:
    """`[samples, heads, tokens, channels]`; query heads may share a key and value head."""
    query, key, value = (kind.shape for kind in types[:3])
    if not len(query) == len(key) == len(value) == 4:
        return computed_by_all(node, types)
    heads = {"heads": key[1], "shared": query[1] // key[1]}
    queries: list[Label] = ["samples", ("heads", "shared"), None, None]
    keys: list[Label] = ["samples", "heads", None, None]
    masks = [queries[4 - len(kind.shape) :] for kind in types[3:]]
    return mapped(
        node,
        types,
        [queries, keys, keys, *masks],
        queries,
        sizes=heads,
        whole={"shared"},
        flops=2.0 * math.prod(query[:3]) * key[2] * (query[3] + value[3]),
        broadcasts=True,
    )


PRODUCTS: dict[str, Rule] = {
    "linear": product("*row inner, columns inner, columns -> *row columns", bias=2),
    "matmul mm bmm mv dot": product(_matmul),
    "outer": product("rows, columns -> rows columns"),
    "addmm baddbmm": product(
        "*batch rows columns, *batch rows inner, *batch inner columns -> *batch rows columns",
        bias=0,
    ),
    "einsum": product(_einsum),
    "conv1d conv2d conv3d": product(_convolution, bias=2),
    "embedding": product(_embedding, linear=(0,), localize=_embedding_part),
    "_grouped_mm transformers.grouped_mm_fallback.default": Rule(
        _grouped_pattern, _grouped_mm_part
    ),
    "scaled_dot_product_attention": Rule(attention),
}
"""Rules by the names of operators."""
