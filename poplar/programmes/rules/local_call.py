"""What one rank calls for its part of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from poplar.programmes.graph.graph import Node, Reference, TensorType
from poplar.programmes.rules.pattern import Pattern, Types
from poplar.programmes.rules.strategy import Strategy

ZEROS = "zeros"
"""Own operator: zeros of the shapes of `LocalCall.outputs`. Its arguments are the node's inputs;
the gradients of those in `LocalCall.passed` are zeros, so that autograd reaches them as on the
other ranks."""
INDEX_PART = "index_part"
"""Own operator: entries of a part of a tensor, and zeros for indices that are not in it. Arguments:
the part, indices, the dimension, the first index of the part, and the size of the whole dimension.
"""
EMBEDDING_PART = "embedding_part"
"""Own operator: as `INDEX_PART`, of a table. Arguments: the part, indices, the first index of the
part, the index without gradient or -1, and the entries of the whole table."""
GROUPED_MM_PART = "grouped_mm_part"
"""Own operator: a grouped product with some of the experts. Arguments: the operator, its tensors
with a part of the experts, the first expert and the one after the last."""


@dataclass(frozen=True, slots=True)
class Zeroed:
    """A tensor argument whose values are replaced by zeros; its gradient is zeros."""

    reference: Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCall:
    """An operator on a rank's own tensors, and a factor of the result."""

    operator: str
    arguments: tuple[Any, ...]
    """The arguments of the node with the sizes of this rank; some tensors may be `Zeroed`."""
    keywords: Mapping[str, Any]
    outputs: tuple[TensorType, ...]
    """Types with the rank's shapes."""
    returns_list: bool = False
    """Whether the node returns a list."""
    scale: float = 1.0
    """Factor of the result."""
    passed: tuple[tuple[int, ...], ...] = ()
    """For `ZEROS`: positions of the inputs that autograd reaches from each output. Empty: all."""

    def with_argument(self, position: int, value: Any) -> LocalCall:
        """The call with another argument; the arguments before it are given."""
        arguments = (*self.arguments[:position], value, *self.arguments[position + 1 :])
        return replace(self, arguments=arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which part of an operator a rank computes."""

    node: Node
    types: Types
    """Types of the node's inputs, on all ranks together."""
    pattern: Pattern
    strategy: Strategy
    ratios: tuple[int, ...]
    rank: int

    @property
    def is_summed(self) -> bool:
        """The operator sums over the axis that is divided."""
        return self.strategy.axis in self.pattern.summed

    @property
    def bounds(self) -> tuple[int, int]:
        """First index and the one after the last of the divided axis."""
        return self.strategy.part(self.pattern, self.ratios, self.rank)

    @property
    def is_first(self) -> bool:
        """This rank is the first one whose part is not empty."""
        return self.bounds[0] == 0 < self.bounds[1]


Localize = Callable[[LocalCall, Part], LocalCall]
"""Turns the call on whole tensors, with the outputs of the rank, into the rank's own call."""


def unchanged(call: LocalCall, part: Part) -> LocalCall:
    """The call of operators whose arguments are the same for every part."""
    return call


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of operator can be divided."""

    pattern: Callable[[Node, Types], Pattern]
    """Makes the pattern of a call from the types of its inputs."""
    localize: Localize = unchanged


def argument(node: Node, position: int, keyword: str = "", default: Any = None) -> Any:
    """An argument by position, or else by keyword, or else its default."""
    if len(node.arguments) > position:
        return node.arguments[position]
    return node.keywords.get(keyword, default)


def with_output_shape(position: int, operator: str = "") -> Localize:
    """The calls of operators whose argument at `position` is the shape of the output.

    Args:
        position: of the shape.
        operator: used instead of the node's, with the shape as the last argument.
    """

    def localized(call: LocalCall, part: Part) -> LocalCall:
        shape = list(call.outputs[0].shape)
        if operator:
            kept = call.arguments[:position]
            return replace(call, operator=operator, arguments=(*kept, shape), keywords={})
        return call.with_argument(position, shape)

    return localized


def weighted_mean(position: int) -> Localize:
    """A partial mean is the mean of the rank's part, times its part of the axis.

    Args:
        position: of the argument `reduction`; 0: the operator is `mean`.
    """
    mean = 1

    def localized(call: LocalCall, part: Part) -> LocalCall:
        if not part.is_summed:
            return call
        if position and argument(part.node, position, "reduction", mean) != mean:
            return call
        start, stop = part.bounds
        return replace(call, scale=(stop - start) / part.pattern.sizes[part.strategy.axis])

    return localized
