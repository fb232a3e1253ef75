"""The best shares for given synchronizations: a linear program.

Every term of a step is convex in the shares: a collective is a maximum of lines in one share each,
a synchronization is a maximum of sums of collectives, and the optimizer is a line per rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from poplar import _core
from poplar.planner.collective_costs import CollectiveCost
from poplar.planner.cost_model import CommunicationSeconds, StageCosts, Synchronization
from poplar.planner.memory_shortfall import suffice
from poplar.planner.rank_groups import group_equal

_SMALLEST_SHARE = 1e-9
"""Smaller shares are rounding errors and become 0."""


class LinearProgram:
    """Minimize `costs . x` over `x >= 0`, subject to rows that are added one by one.

    Solved by the dual simplex method: no cost is negative, so the first basis is dual feasible and
    there is no first phase. The result is deterministic: ties go to the lowest index, and Bland's
    rule ends degenerate programs.
    """

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

    def solve(self) -> tuple[float, list[float]] | None:
        """The minimum and the `x` that reaches it, or None if no `x` satisfies all rows."""
        return _core.minimise(self._costs, self._rows, self._bounds)


class Shared(NamedTuple):
    """Shares, and the minimum of the program that chose them."""

    seconds: float
    shares: tuple[float, ...]


class ShareProblem:
    """Shares between 0 and an upper bound on each rank, at one stage."""

    def __init__(self, costs: StageCosts, upper: Sequence[float]) -> None:
        self._costs = costs
        self._upper = [min(1.0, bound) for bound in upper]
        self._groups = group_equal(zip(costs.cluster.rank_group_indices, self._upper, strict=True))
        """Ranks with equal costs and bounds; their shares are equal in the best plan."""
        first = len(self._groups)
        self._reduce, self._gather, self._optimizer, self._tail = range(first, first + 4)
        self._free = first + 4
        network = costs.cluster.network
        self._unit = max(
            network.reduce_scatter_seconds,
            network.all_gather_seconds,
            *(device.optimizer_seconds for device in costs.cluster.devices),
            1e-9,
        )
        """Seconds that become 1 in the program, so that its numbers are near 1."""

    @property
    def is_feasible(self) -> bool:
        """Whether the ranks together can own the whole state."""
        return suffice(self._upper)

    def least_communication(self) -> CommunicationSeconds:
        """The minimum of each collective; different shares may reach them."""
        gathers = self._costs.schedule.gathers
        gather = self._minimum(self._gather) if gathers else 0.0
        return CommunicationSeconds(gather, self._minimum(self._reduce))

    def most_communication(self) -> CommunicationSeconds:
        """An upper bound on each collective."""
        collectives = self._costs.collectives
        gather = self._most(collectives.all_gather) if self._costs.schedule.gathers else 0.0
        return CommunicationSeconds(gather, self._most(collectives.reduce_scatter))

    def least_tail(self) -> float:
        """The least seconds after the last synchronization."""
        return self._minimum(self._tail)

    def cheapest(self, synchronizations: Sequence[Synchronization]) -> Shared:
        """The least seconds of a step with these synchronizations, and the best shares."""
        usual, costliest = self._costs.split_costliest(synchronizations)
        counts = Counter((synchronization, False) for synchronization in usual)
        counts[costliest, True] += 1
        costs = {self._free + number: float(times) for number, times in enumerate(counts.values())}
        program = self._program({self._tail: 1.0} | costs, self._free + len(counts))
        for number, (synchronization, is_costliest) in enumerate(counts):
            for exposure in self._costs.exposures(synchronization, costliest=is_costliest):
                row = {self._gather: exposure.gather, self._reduce: exposure.reduce}
                row[self._free + number] = -1.0
                program.at_most(-exposure.seconds / self._unit, row)
        shared = self._solve(program)
        computed = math.fsum(synchronization.latest for synchronization in synchronizations)
        return shared._replace(seconds=shared.seconds + computed)

    def lowest(self, bounds: Sequence[tuple[CommunicationSeconds, float]]) -> Shared:
        """A lower bound on the seconds of every step with these batches.

        Args:
            bounds: corners of a box that contains the communication under any allowed shares, each
                with the value of a function that is concave in the box and below the step's
                seconds without its tail.

        Returns:
            The bound and shares that reach it.
        """
        weights = range(self._free, self._free + len(bounds))
        corners, seconds = zip(*bounds, strict=True)

        def weighted(values: Iterable[float]) -> dict[int, float]:
            return {
                weight: value / self._unit for weight, value in zip(weights, values, strict=True)
            }

        program = self._program({self._tail: 1.0} | weighted(seconds), self._free + len(bounds))
        program.equal(1.0, dict.fromkeys(weights, 1.0))
        if self._costs.schedule.gathers:
            row = {self._gather: 1.0} | weighted(-corner.gather for corner in corners)
            program.at_most(0.0, row)
        row = {self._reduce: 1.0} | weighted(-corner.reduce for corner in corners)
        program.at_most(0.0, row)
        return self._solve(program)

    def _program(self, costs: Mapping[int, float], variables: int) -> LinearProgram:
        """Shares, the seconds of collectives and optimizer under them, and the tail."""
        program = LinearProgram(costs, variables)
        for group, ranks in enumerate(self._groups):
            program.at_most(self._upper[ranks[0]], {group: 1.0})
        program.equal(1.0, {group: float(len(ranks)) for group, ranks in enumerate(self._groups)})
        collectives = self._costs.collectives
        group_of = {ranks[0]: group for group, ranks in enumerate(self._groups)}
        for variable, cost in (
            (self._reduce, collectives.reduce_scatter),
            (self._gather, collectives.all_gather),
        ):
            program.at_most(-cost.least / self._unit, {variable: -1.0})
            for rank, constant, slope in cost.lines_of(group_of):
                row = {group_of[rank]: slope / self._unit, variable: -1.0}
                program.at_most(-constant / self._unit, row)
        self._add_tail(program)
        return program

    def _add_tail(self, program: LinearProgram) -> None:
        """The optimizer's variable counts from the largest constant, as variables are not negative.

        A rank's seconds may be negative: what was measured beyond the optimizer can be.
        """
        costs, network = self._costs, self._costs.cluster.network
        constants = [costs.optimizer_seconds(ranks[0], 0.0) for ranks in self._groups]
        always = max(constants)
        for group, constant in enumerate(constants):
            slope = costs.optimizer_seconds(self._groups[group][0], 1.0) - constant
            row = {group: slope / self._unit, self._optimizer: -1.0}
            program.at_most((always - constant) / self._unit, row)
        residual = always + network.step_seconds[costs.stage]
        gather = {self._gather: 1.0} if costs.gathers_after_step else {}
        program.at_most(-residual / self._unit, gather | {self._optimizer: 1.0, self._tail: -1.0})

    def _minimum(self, variable: int) -> float:
        return self._solve(self._program({variable: 1.0}, self._free)).seconds

    def _solve(self, program: LinearProgram) -> Shared:
        """The best shares; the seconds are infinite if rounding errors leave no shares."""
        value, variables = program.solve() or (math.inf, [])
        shares = [0.0] * len(self._upper)
        for ranks, share in zip(self._groups, variables, strict=False):
            for rank in ranks:
                shares[rank] = min(share, self._upper[rank]) if share >= _SMALLEST_SHARE else 0.0
        return Shared(value * self._unit, normalized(shares, self._upper))

    def _most(self, cost: CollectiveCost) -> float:
        """An upper bound on a collective under any shares within the bounds."""
        total = math.fsum(self._upper)
        most = cost.least
        for rank, constant, slope in cost.lines_of(ranks[0] for ranks in self._groups):
            least = max(0.0, 1.0 - (total - self._upper[rank]))
            most = max(most, constant + slope * (self._upper[rank] if slope > 0.0 else least))
        return most


def normalized(shares: Sequence[float], upper: Sequence[float]) -> tuple[float, ...]:
    """Shares that sum to 1 within `upper`: rounding errors are moved to the largest shares."""
    settled = list(shares)
    missing = 1.0 - math.fsum(settled)
    ranks = [
        rank
        for rank, (share, bound) in enumerate(zip(shares, upper, strict=True))
        if (share < bound if missing > 0.0 else share > 0.0)
    ]
    while missing != 0.0 and ranks:
        rank = max(ranks, key=settled.__getitem__)
        ranks.remove(rank)
        moved = min(max(missing, -settled[rank]), upper[rank] - settled[rank])
        settled[rank] += moved
        missing -= moved
    return tuple(settled)
