"""A linear program for shares: tens to a thousand short rows, solved by the dual simplex method.

No cost is negative, so the first basis is dual feasible and there is no first phase. The result is
deterministic: ties go to the lowest index, and Bland's rule ends degenerate programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from poplar import _core


class Solution(NamedTuple):
    """The minimum of a program, and the variables that reach it."""

    value: float
    variables: tuple[float, ...]


class LinearProgram:
    """Minimize `costs . x` over `x >= 0`, subject to rows that are added one by one."""

    def __init__(self, costs: Mapping[int, float], variables: int) -> None:
        """`costs[i]` is the cost of one unit of variable `i`: not negative, 0 if left out."""
        if any(cost < 0.0 for cost in costs.values()):
            raise ValueError(f"costs must not be negative, got {dict(costs)}")
        self._costs = [costs.get(variable, 0.0) for variable in range(variables)]
        self._rows: list[Mapping[int, float]] = []
        self._bounds: list[float] = []

    def at_most(self, bound: float, row: Mapping[int, float]) -> None:
        """Require `sum of row[i] * x[i] <= bound`."""
        self._rows.append(dict(row))
        self._bounds.append(bound)

    def equal(self, value: float, row: Mapping[int, float]) -> None:
        """Require `sum of row[i] * x[i] == value`."""
        self.at_most(value, row)
        self.at_most(-value, {variable: -factor for variable, factor in row.items()})

    def solve(self) -> Solution | None:
        """The minimum, or None if no `x` satisfies all rows."""
        found = _core.minimise(self._costs, self._rows, self._bounds)
        return None if found is None else Solution(found[0], tuple(found[1]))
