"""A small linear programme, for shares: tens to a thousand short rows, no dependencies.

The dual simplex method, because a plan's costs are what is minimised: no cost is negative, so the
empty plan is optimal but not feasible, and there is no first phase. Deterministic: ties go to the
lowest index, and Bland's rule takes over before a degenerate programme could cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from poplar import _core


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
        self._rows: list[Mapping[int, float]] = []
        self._bounds: list[float] = []

    def at_most(self, bound: float, row: Mapping[int, float]) -> None:
        """Demand `sum of row[i] * x[i] <= bound`."""
        self._rows.append(dict(row))
        self._bounds.append(bound)

    def equal(self, value: float, row: Mapping[int, float]) -> None:
        """Demand `sum of row[i] * x[i] == value`."""
        self.at_most(value, row)
        self.at_most(-value, {variable: -factor for variable, factor in row.items()})

    def solve(self) -> Solution | None:
        """The minimum, or None if no `x` satisfies all rows."""
        found = _core.minimise(self._costs, self._rows, self._bounds)
        return None if found is None else Solution(found[0], tuple(found[1]))
