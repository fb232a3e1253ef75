"""Strategies: the combinations of placements with which an operator is right on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded, cut
from poplar.programmes.rules.pattern import Dims, Pattern


@dataclass(frozen=True, slots=True)
class Strategy:
    """Placements of an operator's inputs and of its output."""

    inputs: tuple[Placement | None, ...]
    """Placements in the order of the arguments. None: only the element type is used."""
    output: Placement
    axis: str = ""
    """The axis along which the operator is divided; empty: every rank computes all of it."""
    unit: int = 1
    """Indices of the axis that stay together."""

    def part(self, pattern: Pattern, ratios: Sequence[int], rank: int) -> tuple[int, int]:
        """First index and the one after the last of the axis, on a rank."""
        bounds = cut(pattern.sizes[self.axis], ratios, self.unit)
        return bounds[rank], bounds[rank + 1]


def strategies(
    pattern: Pattern, units: Callable[[str], Iterable[int]] = lambda axis: (1,)
) -> Iterator[Strategy]:
    """All strategies of an operator: computed by all, on partial values, divided along each axis.

    Args:
        units: which units to consider for an axis; those that do not divide it are left out.
    """
    yield Strategy(_read(pattern, lambda index, dims: REPLICATED), REPLICATED)
    for partial in pattern.linear_in:
        yield _on_partial(pattern, partial)
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
    return Strategy(_read(pattern, lambda index, dims: placed(dims)), output, axis, unit)


def strategy_of(
    pattern: Pattern, inputs: Sequence[Placement | None], output: Placement
) -> Strategy:
    """The strategy with these placements.

    Raises:
        ValueError: there is none.
    """
    for candidate in _candidates(pattern, (*inputs, output)):
        if candidate.inputs == tuple(inputs) and candidate.output == output:
            return candidate
    raise ValueError(f"no strategy reads {tuple(inputs)} and computes {output}")


def along(pattern: Pattern, dims: Dims, placement: Sharded) -> Strategy | None:
    """The strategy with a tensor, which has these axes, in this placement."""
    axes, inner = dims[placement.dim], pattern.inner_size(dims, placement.dim)
    if not axes or axes[0] not in pattern.divisible_axes() or placement.unit % inner:
        return None
    return divided(pattern, axes[0], placement.unit // inner)


def _candidates(pattern: Pattern, placements: Sequence[Placement | None]) -> Iterator[Strategy]:
    for placement, dims in zip(placements, (*pattern.inputs, pattern.output), strict=True):
        if isinstance(placement, Sharded) and placement.dim < len(dims):
            strategy = along(pattern, dims, placement)
            if strategy is not None:
                yield strategy
            return
    yield from strategies(pattern)


def _on_partial(pattern: Pattern, partial: frozenset[int]) -> Strategy:
    inputs = _read(pattern, lambda index, dims: PARTIAL if index in partial else REPLICATED)
    return Strategy(inputs, PARTIAL)


def _read(
    pattern: Pattern, placed: Callable[[int, Dims], Placement]
) -> tuple[Placement | None, ...]:
    return tuple(
        None if index in pattern.unread else placed(index, dims)
        for index, dims in enumerate(pattern.inputs)
    )
