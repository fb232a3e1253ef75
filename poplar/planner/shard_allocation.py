"""The cheapest shares for given batches: a linear programme.

Every term of a step is convex in the shares `p`: collectives are maxima of lines in one share each,
a meeting's cost is the largest of a few sums of them, the optimizer is a line per rank. Only
a rank that owns nothing skips the optimizer's latency, a jump at 0: `Owns` says on which side of it
a rank is, and while that is open its optimizer is bounded from below by the line between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from poplar.planner.collective_costs import CollectiveCost
from poplar.planner.cost_model import CommunicationSeconds, Exposure, StageCosts, Synchronization
from poplar.planner.linear_program import LinearProgramme
from poplar.planner.memory_shortfall import suffice
from poplar.planner.rank_groups import members

_SMALLEST_SHARE = 1e-9
"""Less is rounding, and becomes nothing."""
_STEEPEST = 1e-5
"""With room for less, the line between nothing and a latency is too steep for the arithmetic."""


class Owns(IntEnum):
    """Whether a rank owns a part of the state."""

    NOTHING = 0
    SOMETHING = 1
    OPEN = 2


class Shared(NamedTuple):
    """Shares, and the least seconds that were asked for."""

    seconds: float
    shares: tuple[float, ...]


class Corner(NamedTuple):
    """At least `seconds` of meetings a step where this travels at each of them."""

    communication: CommunicationSeconds
    seconds: float


class ShareProblem:
    """Shares between 0 and an upper bound on each rank, at one stage."""

    def __init__(
        self, costs: StageCosts, upper: Sequence[float], owns: Sequence[Owns] | None = None
    ) -> None:
        self._costs = costs
        self._owns = owns or (Owns.SOMETHING,) * len(upper)
        self._upper = [
            0.0 if own is Owns.NOTHING else 1.0 if bound > 1.0 else bound
            for own, bound in zip(self._owns, upper, strict=True)
        ]
        self._groups = self._alike()
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
        """Seconds that become 1 in the programmes, so that their numbers are around 1."""

    def _alike(self) -> list[list[int]]:
        """Ranks that differ in nothing that a share costs: their shares may be taken as equal."""
        kinds = self._costs.cluster.rank_kinds
        return members(zip(kinds, self._upper, self._owns, strict=True))

    @property
    def is_feasible(self) -> bool:
        """Whether the ranks together can own everything."""
        return min(self._upper) >= 0.0 and suffice(self._upper)

    def least_communication(self) -> CommunicationSeconds:
        """The least that travels at a meeting, each part for itself."""
        gathers = self._costs.schedule.gathers
        gathered = self._minimum({self._gather: 1.0}) if gathers else 0.0
        return CommunicationSeconds(gathered, self._minimum({self._reduce: 1.0}))

    def most_communication(self) -> CommunicationSeconds:
        """More travels at no meeting, whatever the shares."""
        collectives = self._costs.collectives
        gathers = self._costs.schedule.gathers
        gathered = self._most(collectives.all_gather) if gathers else 0.0
        return CommunicationSeconds(gathered, self._most(collectives.reduce_scatter))

    def least_tail(self) -> float:
        """The least seconds after the last meeting."""
        return self._minimum({self._tail: 1.0})

    def cheapest(self, synchronizations: Sequence[Synchronization]) -> Shared:
        """The least seconds of a step with these meetings, and the shares that reach them."""
        usual, dearest = self._costs.split_dearest(synchronizations)
        counts = Counter((synchronization, False) for synchronization in usual)
        counts[dearest, True] += 1
        programme = self._programme(
            {self._tail: 1.0}
            | {self._free + number: float(count) for number, count in enumerate(counts.values())},
            self._free + len(counts),
        )
        for number, (synchronization, is_dearest) in enumerate(counts):
            for exposure in self._costs.exposures(synchronization, dearest=is_dearest):
                row = self._communication_row(exposure) | {self._free + number: -1.0}
                programme.at_most(-exposure.seconds / self._unit, row)
        shared = self._solved(programme)
        computed = math.fsum(synchronization.latest for synchronization in synchronizations)
        return shared._replace(seconds=shared.seconds + computed)

    def between(self, corners: Sequence[Corner]) -> Shared | None:
        """A lower bound on the seconds of any step whose traffic lies between these corners.

        Args:
            corners: of a box of traffic, with lower bounds on what meetings cost there that are
                the values of a function which is concave in between.

        Returns:
            The bound, and the shares at which it is reached; None if no shares have such traffic.
        """
        weights = {self._free + number: corner for number, corner in enumerate(corners)}
        programme = self._programme(
            {self._tail: 1.0}
            | {weight: corner.seconds / self._unit for weight, corner in weights.items()},
            self._free + len(corners),
        )
        programme.equal(1.0, dict.fromkeys(weights, 1.0))
        for part, variable in ((0, self._gather), (1, self._reduce)):
            limits = {
                weight: -corner.communication[part] / self._unit
                for weight, corner in weights.items()
            }
            if part or self._costs.schedule.gathers:
                programme.at_most(0.0, {variable: 1.0} | limits)
        return self._solution(programme)

    def _communication_row(self, exposure: Exposure) -> dict[int, float]:
        return {self._gather: exposure.gather, self._reduce: exposure.reduce}

    def _programme(self, costs: Mapping[int, float], variables: int) -> LinearProgramme:
        """Shares, what the collectives and the optimizer take under them, and the tail."""
        programme = LinearProgramme(costs, variables)
        for group, ranks in enumerate(self._groups):
            programme.at_most(self._upper[ranks[0]], {group: 1.0})
        whole = {group: float(len(ranks)) for group, ranks in enumerate(self._groups)}
        programme.equal(1.0, whole)
        collectives = self._costs.collectives
        self._add_collective(programme, collectives.reduce_scatter, self._reduce)
        self._add_collective(programme, collectives.all_gather, self._gather)
        self._add_tail(programme)
        return programme

    def _add_collective(
        self, programme: LinearProgramme, cost: CollectiveCost, variable: int
    ) -> None:
        programme.at_most(-cost.least / self._unit, {variable: -1.0})
        group_of = {ranks[0]: group for group, ranks in enumerate(self._groups)}
        for rank, constant, slope in cost.lines_of(group_of):
            row = {group_of[rank]: slope / self._unit, variable: -1.0}
            programme.at_most(-constant / self._unit, row)

    def _add_tail(self, programme: LinearProgramme) -> None:
        """The optimizer's variable counts from the least that any rank does once a step."""
        costs, network = self._costs, self._costs.cluster.network
        lines = [self._optimizer_line(ranks[0]) for ranks in self._groups]
        always = max(constant for constant, _ in lines)
        for group, (constant, slope) in enumerate(lines):
            row = {group: slope / self._unit, self._optimizer: -1.0}
            programme.at_most((always - constant) / self._unit, row)
        residual = always + network.step_seconds[costs.stage]
        gather = {self._gather: 1.0} if costs.gathers_after_step else {}
        programme.at_most(-residual / self._unit, gather | {self._optimizer: 1.0, self._tail: -1.0})

    def _optimizer_line(self, rank: int) -> tuple[float, float]:
        """What this rank does after the last meeting, at least: constant and slope in its share."""
        costs, upper = self._costs, self._upper[rank]
        nothing = costs.optimizer_seconds(rank, 0.0)
        if self._owns[rank] is Owns.NOTHING or upper <= 0.0:
            return nothing, 0.0
        if self._owns[rank] is Owns.OPEN and upper < _STEEPEST:
            return nothing, 0.0
        if self._owns[rank] is Owns.OPEN:
            return nothing, (costs.optimizer_seconds(rank, upper) - nothing) / upper
        whole, half = costs.optimizer_seconds(rank, 1.0), costs.optimizer_seconds(rank, 0.5)
        return 2.0 * half - whole, 2.0 * (whole - half)

    def _minimum(self, costs: Mapping[int, float]) -> float:
        return self._solved(self._programme(costs, self._free)).seconds

    def _solved(self, programme: LinearProgramme) -> Shared:
        shared = self._solution(programme)
        if shared is None:
            raise ArithmeticError(f"no shares lie below {self._upper}; ask is_feasible first")
        return shared

    def _solution(self, programme: LinearProgramme) -> Shared | None:
        found = programme.solve()
        if found is None:
            return None
        shares = [0.0] * len(self._upper)
        for ranks, share in zip(self._groups, found.variables, strict=False):
            if share >= _SMALLEST_SHARE:
                share = min(share, self._upper[ranks[0]])
                for rank in ranks:
                    shares[rank] = share
        return Shared(found.value * self._unit, settle(shares, self._upper))

    def _most(self, cost: CollectiveCost) -> float:
        """The longest that a collective takes under any shares within the bounds."""
        room = math.fsum(self._upper)
        most = cost.least
        for rank, constant, slope in cost.lines_of(ranks[0] for ranks in self._groups):
            least = max(0.0, 1.0 - (room - self._upper[rank]))
            most = max(most, constant + slope * (self._upper[rank] if slope > 0.0 else least))
        return most


def settle(shares: Sequence[float], upper: Sequence[float]) -> tuple[float, ...]:
    """The shares, within their bounds without what rounding did to their sum, which is 1."""
    kept = list(shares)
    missing = 1.0 - math.fsum(kept)
    for rank in _largest_first(kept, upper, grow=missing > 0.0):
        if missing == 0.0:
            break
        moved = min(max(missing, -kept[rank]), upper[rank] - kept[rank])
        kept[rank] += moved
        missing -= moved
    return tuple(kept)


def _largest_first(shares: Sequence[float], upper: Sequence[float], *, grow: bool) -> Iterator[int]:
    """Ranks whose share may grow, or shrink; the first, often enough, is found without sorting."""
    places = [
        rank
        for rank, (share, bound) in enumerate(zip(shares, upper, strict=True))
        if (share < bound if grow else share > 0.0)
    ]
    if places:
        first = max(places, key=shares.__getitem__)
        yield first
        places.sort(key=lambda place: (-shares[place], place))
        yield from (place for place in places if place != first)
