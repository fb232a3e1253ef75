"""A rule: the pattern of an operator and how its arguments become those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from poplar.programmes.graph.graph import Node, TensorType
from poplar.programmes.rules.local_call import Localize, unchanged
from poplar.programmes.rules.pattern import Pattern, named

Types = tuple[TensorType, ...]


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


def counted_from_first(dim: int, dims: int) -> int:
    """A dimension of a tensor of `dims` dimensions, as torch counts negative ones."""
    return dim + dims if dim < 0 else dim


def computed_by_all(node: Node, types: Types) -> Pattern:
    """The pattern of an operator without a rule: every rank needs all and computes all."""
    sizes: dict[str, int] = {}
    inputs = tuple(named(f"in{index}_", kind.shape, sizes) for index, kind in enumerate(types))
    output = named("out", node.output.shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=inputs,
        output=output,
        whole=frozenset(sizes),
        flops=node.output.numel,
    )
