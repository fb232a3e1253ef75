"""Strategies: the combinations of placements with which an operator is right on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.rules.pattern import Dims, Pattern


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements of an operator's inputs and of its output."""

    inputs: tuple[Placement, ...]
    """Placements in the order of the arguments."""
    output: Placement
    axis: str = ""
    """The axis along which the operator is divided; empty: every rank computes all of it."""
    unit: int = 1
    """Indices of the axis that stay together."""


def strategies(
    pattern: Pattern, units: Callable[[str], Iterable[int]] = lambda axis: (1,)
) -> Iterator[Strategy]:
    """All strategies of an operator: computed by all, on partial values, divided along each axis.

    Args:
        units: which units to consider for an axis; those that do not divide it are left out.
    """
    inputs = range(len(pattern.inputs))
    yield Strategy((REPLICATED,) * len(inputs), REPLICATED)
    for partial in pattern.linear_in:
        yield Strategy(tuple(PARTIAL if at in partial else REPLICATED for at in inputs), PARTIAL)
    for axis in pattern.divisible_axes():
        for unit in dict.fromkeys(units(axis)):
            if pattern.sizes[axis] % unit == 0:
                yield divided(pattern, axis, unit)


def divided(pattern: Pattern, axis: str, unit: int = 1) -> Strategy:
    """The strategy that gives each rank a part of an axis, in multiples of `unit` indices."""

    def placed(dims: Dims) -> Placement:
        dim = pattern.dim_of(dims, axis)
        if dim is None:
            return REPLICATED
        return Sharded(dim, unit * pattern.inner_size(dims, dim))

    output = PARTIAL if axis in pattern.summed else placed(pattern.output)
    return Strategy(tuple(map(placed, pattern.inputs)), output, axis, unit)


def strategy_of(pattern: Pattern, inputs: Sequence[Placement], output: Placement) -> Strategy:
    """The strategy with these placements.

    Raises:
        ValueError: there is none.
    """
    placed = zip((*inputs, output), (*pattern.inputs, pattern.output), strict=True)
    sharded = [
        (own, dims) for own, dims in placed if isinstance(own, Sharded) and own.dim < len(dims)
    ]
    found = [along(pattern, dims, own) for own, dims in sharded[:1]]
    for candidate in found or strategies(pattern):
        if candidate and candidate.inputs == tuple(inputs) and candidate.output == output:
            return candidate
    raise ValueError(f"no strategy reads {tuple(inputs)} and computes {output}")


def along(pattern: Pattern, dims: Dims, placement: Sharded) -> Strategy | None:
    """The strategy with a tensor, which has these axes, in this placement."""
    axes, inner = dims[placement.dim], pattern.inner_size(dims, placement.dim)
    if not axes or axes[0] not in pattern.divisible_axes() or placement.unit % inner:
        return None
    return divided(pattern, axes[0], placement.unit // inner)
