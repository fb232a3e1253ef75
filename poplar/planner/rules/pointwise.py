"""Operators whose output depends, at each index, on the inputs at the same index."""

from __future__ import annotations

from poplar.planner.graph.graph import Node
from poplar.planner.rules.pattern import Pattern, elementwise
from poplar.planner.rules.rule import Rule, Types

_LINEAR_IN_FIRST = ("neg", "clone", "alias", "detach", "contiguous", "div", "mul")
_LINEAR_IN_BOTH = ("add", "sub")
_LINEAR_IN_EACH = ("mul",)
_CASTS = ("_to_copy", "to")
_MATHEMATICS = (
    "abs exp log log1p sqrt rsqrt square reciprocal sin cos sign floor pow rsub clamp clamp_min "
    "clamp_max maximum minimum where masked_fill addcmul lerp isnan isinf"
)
_ACTIVATIONS = (
    "relu gelu silu mish tanh sigmoid log_sigmoid softplus elu erf leaky_relu hardtanh hardswish "
    "hardsigmoid selu relu6"
)
_COMPARISONS = (
    "eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not"
)
_NEW_VALUES = "zeros_like ones_like full_like"
NAMES = (
    *_LINEAR_IN_FIRST,
    *_LINEAR_IN_BOTH,
    *_CASTS,
    *" ".join((_MATHEMATICS, _ACTIVATIONS, _COMPARISONS, _NEW_VALUES)).split(),
)
"""Base names of operators, such as `add` of `aten.add.Tensor`."""


def pointwise(node: Node, types: Types) -> Pattern:
    """The pattern with broadcast inputs."""
    linear_in = _linear_in(node, types)
    return elementwise(node.output, types, linear_in=linear_in, flops=node.output.numel)


def _linear_in(node: Node, types: Types) -> tuple[frozenset[int], ...]:
    name = node.operator.split(".")[1]
    first, both = frozenset({0}), frozenset({0, 1})
    if name in _LINEAR_IN_BOTH:
        # A number is added by every rank, and a tensor of fewer elements is a partial sum too.
        return (both,) if len(types) == 2 else ()
    if name in _LINEAR_IN_EACH and len(types) == 2:
        return (first, frozenset({1}))
    if name == "div" and "mode" in node.operator + "".join(node.keywords):
        return ()  # rounded
    if name in _CASTS:
        return (first,) if node.output.is_floating or not types[0].is_floating else ()
    is_linear = name in _LINEAR_IN_FIRST and len(types) >= 1 and _reads_first(node)
    return (first,) if is_linear else ()


def _reads_first(node: Node) -> bool:
    """Whether the first argument is a tensor: it may be a number in `1 / x`."""
    return bool(node.inputs) and getattr(node.arguments[0], "node", None) == node.inputs[0]


POINTWISE = Rule(pointwise)
