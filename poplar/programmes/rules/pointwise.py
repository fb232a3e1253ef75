"""Operators whose output depends, at each index, on the inputs at the same index."""

from __future__ import annotations

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import Rule
from poplar.programmes.rules.pattern import Pattern, Types, mapped

_LINEAR = {
    **dict.fromkeys(("neg", "clone", "alias", "detach", "contiguous", "div"), ((0,),)),
    **dict.fromkeys(("_to_copy", "to"), ((0,),)),
    # A number is added by every rank, and a tensor of fewer elements is a partial sum too.
    **dict.fromkeys(("add", "sub"), ((0, 1),)),
    "mul": ((0,), (1,)),
}
"""Sets of inputs in which operators are linear together."""
_OTHERS = (
    "abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sign sgn pow rsub "
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh hypot erf erfc logit "
    "floor ceil round trunc frac floor_divide remainder fmod clamp clamp_min clamp_max maximum "
    "minimum where masked_fill addcmul addcdiv lerp logaddexp xlogy nan_to_num isnan isinf "
    "isfinite copy fill polar complex "
    "relu gelu silu mish tanh sigmoid log_sigmoid softplus elu celu leaky_relu hardtanh hardswish "
    "hardsigmoid hardshrink softshrink threshold selu relu6 "
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or "
    "bitwise_xor bitwise_not __and__ __or__ __xor__ "
    "zeros_like ones_like full_like empty_like max.other min.other"
)


def _pointwise(node: Node, types: Types) -> Pattern:
    """The pattern with inputs that are broadcast."""
    dims = range(len(node.output.shape))
    inputs = [dims[len(dims) - len(kind.shape) :] for kind in types]
    return mapped(
        node,
        types,
        inputs,
        dims,
        linear_in=_linear_in(node, types),
        flops=node.output.numel,
        broadcasts=True,
    )


def _linear_in(node: Node, types: Types) -> list[tuple[int, ...]]:
    is_rounded = "mode" in node.operator + "".join(node.keywords)
    starts_with_number = getattr(node.arguments[0], "node", None) is None if types else True
    if is_rounded or starts_with_number:  # as in `1 / x`
        return []
    return [part for part in _LINEAR.get(node.operator.split(".")[1], ()) if max(part) < len(types)]


POINTWISE = {" ".join((*_LINEAR, _OTHERS)): Rule(_pointwise)}
"""Rules by the names of operators."""
