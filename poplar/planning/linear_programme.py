"""A small dense linear programme, for shares: tens of rows, no dependencies.

The dual simplex method, because a plan's costs are what is minimised: no cost is negative, so the
empty plan is optimal but not feasible, and there is no first phase. Deterministic: ties go to the
lowest index, and Bland's rule takes over before a degenerate programme could cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_TOLERANCE = 1e-12
"""Of programmes whose numbers are around 1."""
_ROUNDING = 1e-8
"""A row that is violated by less and cannot be mended was broken by rounding."""
_PIVOTS_BEFORE_BLAND = 200
_MOST_PIVOTS = 20_000


class Solution(NamedTuple):
    """Where a programme has its minimum."""

    value: float
    variables: tuple[float, ...]


class LinearProgramme:
    """Minimise `costs . x` over `x >= 0`, subject to rows that are added one by one."""

    def __init__(self, costs: Mapping[int, float], variables: int) -> None:
        """`costs[i]` is what a unit of variable `i` costs: 0 if left out, never negative."""
        if any(cost < 0.0 for cost in costs.values()):
            raise ValueError(f"costs must not be negative, got {dict(costs)}")
        self._costs = [costs.get(variable, 0.0) for variable in range(variables)]
        self._rows: list[list[float]] = []
        self._bounds: list[float] = []

    def at_most(self, bound: float, row: Mapping[int, float]) -> None:
        """Demand `sum of row[i] * x[i] <= bound`."""
        self._rows.append([row.get(variable, 0.0) for variable in range(len(self._costs))])
        self._bounds.append(bound)

    def equal(self, value: float, row: Mapping[int, float]) -> None:
        """Demand `sum of row[i] * x[i] == value`."""
        self.at_most(value, row)
        self.at_most(-value, {variable: -factor for variable, factor in row.items()})

    def solve(self) -> Solution | None:
        """The minimum, or None if no `x` satisfies all rows."""
        costs, value = list(self._costs), 0.0
        rows, bounds = [list(row) for row in self._rows], list(self._bounds)
        outside = list(range(len(costs)))
        inside = [len(costs) + number for number in range(len(rows))]
        for pivots in range(_MOST_PIVOTS):
            leaving = _leaving(bounds, inside, bland=pivots >= _PIVOTS_BEFORE_BLAND)
            if leaving is None:
                break
            entering = _entering(rows[leaving], costs, outside)
            if entering is None:
                if bounds[leaving] < -_ROUNDING:
                    return None
                bounds[leaving] = 0.0
                continue
            value += _pivot(rows, bounds, costs, leaving, entering)
            inside[leaving], outside[entering] = outside[entering], inside[leaving]
        else:
            raise ArithmeticError(
                f"a linear programme of {len(rows)} rows did not end within {_MOST_PIVOTS} pivots"
            )
        found = [0.0] * len(costs)
        for variable, bound in zip(inside, bounds, strict=True):
            if variable < len(found):
                found[variable] = max(0.0, bound)
        return Solution(value, tuple(found))


def _leaving(bounds: list[float], inside: list[int], *, bland: bool) -> int | None:
    """The row that is violated most, or with Bland's rule the violated one of least index."""
    violated = [row for row, bound in enumerate(bounds) if bound < -_TOLERANCE]
    return min(violated, key=inside.__getitem__ if bland else bounds.__getitem__, default=None)


def _entering(row: list[float], costs: list[float], outside: list[int]) -> int | None:
    """The column that becomes feasible in `row` at the least cost; None: none does."""
    ratios = [
        (costs[column] / -factor, outside[column], column)
        for column, factor in enumerate(row)
        if factor < -_TOLERANCE
    ]
    return min(ratios)[2] if ratios else None


def _pivot(
    rows: list[list[float]], bounds: list[float], costs: list[float], leaving: int, entering: int
) -> float:
    """Exchange a row's variable for a column's, in place; what the objective gains by it."""
    inverse = 1.0 / rows[leaving][entering]
    pivot_row = [factor * inverse for factor in rows[leaving]]
    pivot_row[entering] = inverse
    pivot_bound = bounds[leaving] * inverse
    for number, row in enumerate(rows):
        factor = row[entering]
        if number != leaving and factor != 0.0:
            row[entering] = 0.0
            rows[number] = [a - factor * b for a, b in zip(row, pivot_row, strict=True)]
            bounds[number] -= factor * pivot_bound
    rows[leaving], bounds[leaving] = pivot_row, pivot_bound
    factor = costs[entering]
    if factor == 0.0:
        return 0.0
    costs[entering] = 0.0
    costs[:] = [a - factor * b for a, b in zip(costs, pivot_row, strict=True)]
    return factor * pivot_bound
