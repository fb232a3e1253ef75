"""What one rank calls for its part of an operator: a node with the rank's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.pattern import Pattern, Types

ZEROS = "zeros"
"""Own operator: zeros of the shapes of `Node.outputs`. Its arguments are the node's inputs, which
autograd reaches as on the other ranks, with gradients of zeros."""
SCALED, WITH_ZEROS = "scaled", "with_zeros"
INDEX_PART, EMBEDDING_PART, GROUPED_MM_PART = "index_part", "embedding_part", "grouped_mm_part"
"""Other own operators: functions of `run.local_execution`, which documents their arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which part of an operator a rank computes."""

    node: Node
    types: Types
    """Types of the node's inputs, on all ranks together."""
    is_summed: bool
    """The operator sums over the axis that is divided."""
    start: int
    stop: int
    """First index and the one after the last of the divided axis."""
    size: int
    """Indices of the axis on all ranks."""


Localize = Callable[[Node, Part], Node]
"""Turns the node, with the outputs of the rank, into the rank's own call."""


def unchanged(call: Node, part: Part) -> Node:
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

    def localized(call: Node, part: Part) -> Node:
        before, after = call.arguments[:position], call.arguments[position + 1 :]
        shape = list(call.output.shape)
        if operator:
            return replace(call, operator=operator, arguments=(*before, shape), keywords={})
        return replace(call, arguments=(*before, shape, *after))

    return localized


def weighted_mean(position: int) -> Localize:
    """A partial mean is the mean of the rank's part, times its part of the axis.

    Args:
        position: of the argument `reduction`; 0: the operator is `mean`.
    """
    mean = 1

    def localized(call: Node, part: Part) -> Node:
        if not part.is_summed:
            return call
        if position and argument(part.node, position, "reduction", mean) != mean:
            return call
        scale = (part.stop - part.start) / part.size
        return replace(call, operator=SCALED, arguments=(scale, call.operator, *call.arguments))

    return localized
