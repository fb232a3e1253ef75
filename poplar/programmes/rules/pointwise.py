"""Operators whose output depends, at each index, on the inputs at the same index."""

from __future__ import annotations

from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.pattern import Pattern, elementwise, named
from poplar.programmes.rules.rule import Rule, Types

_LINEAR_IN_FIRST = ("neg", "clone", "alias", "detach", "contiguous", "div", "mul")
_LINEAR_IN_BOTH = ("add", "sub")
_LINEAR_IN_EACH = ("mul",)
_CASTS = ("_to_copy", "to")
_MATHEMATICS = (
    "abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sign sgn pow rsub "
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh hypot erf erfc logit "
    "floor ceil round trunc frac floor_divide remainder fmod clamp clamp_min clamp_max maximum "
    "minimum where masked_fill addcmul addcdiv lerp logaddexp xlogy nan_to_num isnan isinf "
    "isfinite copy fill polar complex"
)
_ACTIVATIONS = (
    "relu gelu silu mish tanh sigmoid log_sigmoid softplus elu celu leaky_relu hardtanh hardswish "
    "hardsigmoid hardshrink softshrink threshold selu relu6"
)
_COMPARISONS = (
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or "
    "bitwise_xor bitwise_not __and__ __or__ __xor__"
)
_NEW_VALUES = "zeros_like ones_like full_like empty_like"
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


def type_as(node: Node, types: Types) -> Pattern:
    """A cast to the type of another tensor, of which nothing else is used."""
    cast = pointwise(node, types[:1])
    sizes = dict(cast.sizes)
    other = named("other", types[1].shape, sizes)
    whole = frozenset(sizes.keys() - cast.sizes.keys())
    is_linear = node.output.is_floating or not types[0].is_floating
    return replace(
        cast,
        sizes=sizes,
        inputs=(*cast.inputs, other),
        whole=whole,
        unread=frozenset({1}),
        linear_in=(frozenset({0}),) if is_linear else (),
    )


POINTWISE = Rule(pointwise)
TYPE_AS = Rule(type_as)
