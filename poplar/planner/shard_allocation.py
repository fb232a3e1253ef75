"""The best shares for given synchronizations: a linear program.

Every term of a step is convex in the shares: a collective is a maximum of lines in one share each,
a synchronization is a maximum of sums of collectives, and the optimizer is a line per rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from poplar import _core
from poplar.planner.collective_costs import CollectiveCost
from poplar.planner.communication_schedule import CommunicationSeconds, Synchronization
from poplar.planner.cost_model import StageCosts, group_equal
from poplar.planner.share_limits import Hull, suffice
from poplar.values.profile import host_compositions

_ROUNDING = 1e-9
_SMALLEST_SHARE = 1e-9
"""Smaller shares are rounding errors and become 0."""


Row = tuple[float, Mapping[int, float]]
"""A bound on `sum of factors[i] * x[i]`, and the factors by variable."""


def minimize(costs: Sequence[float], rows: Sequence[Row]) -> tuple[float, list[float]] | None:
    """Minimize `costs . x` over `x >= 0`, with every row at most its bound.

    Returns:
        The minimum and the `x` that reaches it, or None if no `x` satisfies all rows.

    Raises:
        ValueError: a cost is negative.

    Solved by the dual simplex method: no cost is negative, so the first basis is dual feasible and
    there is no first phase. The result is deterministic: ties go to the lowest index, and Bland's
    rule ends degenerate programs.
    """
    if min(costs) < 0.0:
        raise ValueError(f"costs must not be negative, got {costs}")
    return _core.minimise(costs, [factors for _, factors in rows], [bound for bound, _ in rows])


def equal(value: float, factors: Mapping[int, float]) -> tuple[Row, Row]:
    """The rows that require `sum of factors[i] * x[i] == value`."""
    return (value, factors), (-value, {variable: -factor for variable, factor in factors.items()})


class Shared(NamedTuple):
    """Shares, and the minimum of the program that chose them."""

    seconds: float
    shares: tuple[float, ...]


class ShareProblem:
    """Shares between 0 and an upper bound on each rank, at one stage.

    [Note: room for a step]
    With `hulls` the ranks together also hold the samples of a step. The bound on a rank's share
    falls with its samples; the program uses the concave hull of that bound and parts of samples.
    """

    def __init__(
        self,
        costs: StageCosts,
        upper: Sequence[float],
        hulls: Sequence[Hull] = (),
        samples: int = 0,
    ) -> None:
        """Args:
        upper: by rank.
        hulls: by rank, its largest share beside some samples; empty: the ranks need not hold any.
        """
        self._costs = costs
        self._upper = [min(1.0, bound) for bound in upper]
        network = costs.cluster.network
        indices = costs.cluster.rank_group_indices
        equal = list(zip(indices, self._upper, hulls or indices, strict=True))
        compositions = host_compositions(network.hosts, equal)
        self._groups = group_equal(zip(equal, compositions, strict=True))
        """Ranks with equal costs and bounds, on equal hosts; their shares are equal in the best
        plan."""
        first = len(self._groups)
        self._reduce, self._gather, self._optimizer, self._tail = range(first, first + 4)
        self._levels: dict[int, list[int]] = {}
        """The variables of the levels of each collective; a single level is the collective."""
        self._free = first + 4
        reduce, gather = costs.collectives.reduce_scatter, costs.collectives.all_gather
        for variable, cost in ((self._reduce, reduce), (self._gather, gather)):
            levels = len(cost.levels)
            self._levels[variable] = [variable]
            if levels > 1:
                self._levels[variable] = [*range(self._free, self._free + levels)]
                self._free += levels
        self._ranks_on_host: dict[int, Counter[int]] = {}
        """By host, the number of its ranks in each group."""
        for group, ranks in enumerate(self._groups):
            for rank in ranks if network.hosts else ():
                self._ranks_on_host.setdefault(network.hosts[rank], Counter())[group] += 1
        self._unit = max(
            network.reduce_scatter_seconds,
            network.all_gather_seconds,
            *(device.optimizer_seconds for device in costs.cluster.devices),
            1e-9,
        )
        """Seconds that become 1 in the program, so that its numbers are near 1."""
        self._rows = list(self._shared_rows())
        if hulls:
            self._rows += self._room_rows(hulls, samples)

    @property
    def is_feasible(self) -> bool:
        """Whether the ranks together can own the whole state."""
        return suffice(self._upper)

    def least_communication(self) -> CommunicationSeconds:
        """The minimum of each collective; different shares may reach them."""
        gather = self._solve(self._gather).seconds if self._costs.schedule.gathers else 0.0
        return CommunicationSeconds(gather, self._solve(self._reduce).seconds)

    def most_communication(self) -> CommunicationSeconds:
        """An upper bound on each collective."""
        collectives = self._costs.collectives
        gather = self._most(collectives.all_gather) if self._costs.schedule.gathers else 0.0
        return CommunicationSeconds(gather, self._most(collectives.reduce_scatter))

    def least_tail(self) -> float:
        """The least seconds after the last synchronization."""
        return self._solve(self._tail).seconds

    def cheapest(self, synchronizations: Mapping[tuple[Synchronization, bool], int]) -> Shared:
        """The least seconds of a step with these synchronizations (see `StageCosts.counted`), and
        the best shares.
        """
        usual, costliest = self._costs.schedules
        rows: list[Row] = []
        for exposed, (one, is_costliest) in enumerate(synchronizations, self._free):
            for exposure in (costliest if is_costliest else usual).exposures(one):
                row = {self._gather: exposure.gather, self._reduce: exposure.reduce, exposed: -1.0}
                rows.append((-exposure.seconds / self._unit, row))
        counts = map(float, synchronizations.values())
        shared = self._solve(self._tail, counts, rows)
        computed = math.fsum(n * one.latest for (one, _), n in synchronizations.items())
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
        corners, seconds = zip(*bounds, strict=True)

        def weighted(values: Iterable[float]) -> dict[int, float]:
            return {weight: value / self._unit for weight, value in enumerate(values, self._free)}

        weights = weighted(seconds)
        rows = [*equal(1.0, dict.fromkeys(weights, 1.0))]
        if self._costs.schedule.gathers:
            rows.append((0.0, {self._gather: 1.0} | weighted(-corner.gather for corner in corners)))
        rows.append((0.0, {self._reduce: 1.0} | weighted(-corner.reduce for corner in corners)))
        return self._solve(self._tail, weights.values(), rows)

    def _shared_rows(self) -> Iterator[Row]:
        """The shares, the seconds of collectives and optimizer under them, and the tail."""
        for group, ranks in enumerate(self._groups):
            yield self._upper[ranks[0]], {group: 1.0}
        yield from equal(
            1.0, {group: float(len(ranks)) for group, ranks in enumerate(self._groups)}
        )
        collectives = self._costs.collectives
        yield from self._collective_rows(collectives.reduce_scatter, self._reduce)
        yield from self._collective_rows(collectives.all_gather, self._gather)
        yield from self._tail_rows()

    def _room_rows(self, hulls: Sequence[Hull], samples: int) -> Iterator[Row]:
        """See [Note: room for a step]. A variable is a rank's part of the samples."""
        held = {}
        for group, ranks in enumerate(self._groups):
            variable, self._free = self._free, self._free + 1
            held[variable] = -float(len(ranks))
            own = hulls[ranks[0]]
            yield own[-1].samples / samples, {variable: 1.0}
            for first, last in pairwise(own):
                slope = (last.share - first.share) / (last.samples - first.samples)
                yield first.share - slope * first.samples, {group: 1.0, variable: -slope * samples}
        yield -1.0 + _ROUNDING, held

    def _collective_rows(self, cost: CollectiveCost, variable: int) -> Iterator[Row]:
        """A collective takes the sum of its levels, and each level at least each of its lines."""
        yield -cost.least / self._unit, {variable: -1.0}
        levels = self._levels[variable]
        if len(levels) > 1:
            yield 0.0, {variable: -1.0} | dict.fromkeys(levels, 1.0)
        for level, seconds in zip(cost.levels, levels, strict=True):
            for group, ranks in enumerate(self._groups):
                for line in level[ranks[0]]:
                    slopes = {group: line.rank}
                    for other, count in self._on_host_of(ranks[0]) if line.host else ():
                        slopes[other] = slopes.get(other, 0.0) + count * line.host
                    if any(slopes.values()) or line.constant > 0.0:
                        row = {other: slope / self._unit for other, slope in slopes.items()}
                        yield -line.constant / self._unit, row | {seconds: -1.0}

    def _on_host_of(self, rank: int) -> Iterable[tuple[int, int]]:
        """The groups on the host of a rank, each with the number of its ranks there."""
        hosts = self._costs.cluster.network.hosts
        return self._ranks_on_host[hosts[rank]].items() if hosts else ()

    def _tail_rows(self) -> Iterator[Row]:
        """The optimizer's variable counts from the largest constant, as variables are not negative.

        A rank's seconds may be negative: what was measured beyond the optimizer can be.
        """
        costs = self._costs
        constants = [costs.optimizer_seconds(ranks[0], 0.0) for ranks in self._groups]
        always = max(constants)
        for group, constant in enumerate(constants):
            slope = costs.optimizer_seconds(self._groups[group][0], 1.0) - constant
            row = {group: slope / self._unit, self._optimizer: -1.0}
            yield (always - constant) / self._unit, row
        residual = always + costs.step_residual
        gather = {self._gather: 1.0} if costs.gathers_after_step else {}
        yield -residual / self._unit, gather | {self._optimizer: 1.0, self._tail: -1.0}

    def _solve(
        self, variable: int, costs: Iterable[float] = (), rows: Iterable[Row] = ()
    ) -> Shared:
        """The least seconds of a variable and further ones with these costs and rows.

        The seconds are infinite if rounding errors leave no shares.
        """
        objective = [0.0] * self._free + [*costs]
        objective[variable] = 1.0
        value, variables = minimize(objective, [*self._rows, *rows]) or (math.inf, [])
        shares = [0.0] * len(self._upper)
        for ranks, share in zip(self._groups, variables, strict=False):
            for rank in ranks:
                shares[rank] = min(share, self._upper[rank]) if share >= _SMALLEST_SHARE else 0.0
        return Shared(value * self._unit, normalized(shares, self._upper))

    def _most(self, cost: CollectiveCost) -> float:
        """An upper bound on a collective under any shares within the bounds."""
        total = math.fsum(self._upper)

        def ends(upper: float) -> tuple[float, float]:
            """The smallest and the largest share of ranks that may own `upper` together."""
            return max(0.0, 1.0 - (total - upper)), min(1.0, upper)

        most = [0.0] * len(cost.levels)
        for ranks in self._groups:
            own = ends(self._upper[ranks[0]])
            host = ends(
                math.fsum(
                    count * self._upper[self._groups[group][0]]
                    for group, count in self._on_host_of(ranks[0])
                )
            )
            for number, level in enumerate(cost.levels):
                for line in level[ranks[0]]:
                    largest = max(line.rank * share for share in own)
                    largest += max(line.host * share for share in host)
                    most[number] = max(most[number], line.constant + largest)
        return max(cost.least, math.fsum(most))


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
