"""The first plan of a stage: the best batches for given shares, then the best shares for those.

Each half is exact, and every result fits in memory. Branch and bound starts from this plan, finds
others in the same way, and may stop at its first node on large clusters;
`benchmarks/search.py` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from poplar.planner.batch_allocation import BatchAllocator, MicroBatches
from poplar.planner.cost_model import StageCosts, map_distinct
from poplar.planner.memory_model import Caps
from poplar.planner.memory_shortfall import (
    Request,
    largest_shares,
    least_of_one_pass,
    least_of_several_passes,
    shortfall_of,
)
from poplar.planner.shard_allocation import ShareProblem


class Candidate(NamedTuple):
    """Batches and shares that fit in memory, and the predicted seconds of their step."""

    seconds: float
    micro_batches: MicroBatches
    shares: tuple[float, ...]


NOTHING_FITS = Candidate(math.inf, (), ())


class Alternation:
    """Solvers for one stage: the best batches for given shares, and the best shares for batches.

    They return `NOTHING_FITS` if no batches fit beside the shares, or no shares beside the batches.
    """

    def __init__(self, costs: StageCosts, request: Request) -> None:
        self.costs = costs
        self.request = request
        self.batches = BatchAllocator(costs, request.global_batch)

    def first_plan(self) -> Candidate:
        """The best of three plans: from even shares, and from the two that need the least memory.

        A plan, if one fits.
        """
        costs, request = self.costs, self.request
        even = costs.cluster.even_shares
        if not costs.shares_matter:
            return self.best_batches(even)
        _, shares = least_of_several_passes(costs, request)
        found = fastest(self.alternate(even), self.alternate(shares))
        if found is NOTHING_FITS:
            samples, _ = least_of_one_pass(costs, request)
            idle = (0,) if costs.synchronizes_every_pass else ()
            batches = tuple((own,) if own else idle for own in samples)
            found = self.best_shares(batches) if batches else found
        return found

    def alternate(self, shares: Sequence[float]) -> Candidate:
        """The best batches for these shares, with the best shares for those batches."""
        found = self.best_batches(shares)
        if found is NOTHING_FITS:
            return found
        return fastest(found, self.best_shares(found.micro_batches))

    def best_batches(self, shares: Sequence[float]) -> Candidate:
        """The fastest plan with these shares."""
        caps = self.largest_caps(shares)
        if min(cap.first for cap in caps) < 0:
            return NOTHING_FITS
        solvers = [self.batches.under(caps)]
        if self.costs.synchronizes_every_pass:
            solvers.insert(0, self.batches.under(tuple(Caps(cap.first) for cap in caps)))
        communication = self.costs.communication(shares)
        found = [solver.cheapest(communication) for solver in solvers]
        return fastest(*(self._candidate(own, shares) for own in found if own), NOTHING_FITS)

    def best_shares(self, micro_batches: MicroBatches) -> Candidate:
        """The fastest plan with these batches."""
        upper = largest_shares(self.costs, map_distinct(Caps.of, micro_batches))
        problem = ShareProblem(self.costs, upper)
        if not problem.is_feasible:
            return NOTHING_FITS
        synchronizations = self.costs.counted(self.costs.synchronizations(micro_batches))
        return self._candidate(micro_batches, problem.cheapest(synchronizations).shares)

    def largest_caps(self, shares: Sequence[float]) -> tuple[Caps, ...]:
        """By rank, the largest micro-batches that fit beside its share."""
        memories, at_most = self.costs.memories, self.request.max_micro_batch
        return tuple(
            self.costs.by_rank(lambda rank, own: memories[rank].largest_caps(own, at_most), shares)
        )

    def _candidate(self, micro_batches: MicroBatches, shares: Sequence[float]) -> Candidate:
        seconds = self.costs.step_seconds(micro_batches, shares)
        return Candidate(seconds, micro_batches, tuple(shares))


def with_smaller_passes_first(costs: StageCosts, candidate: Candidate) -> Candidate:
    """The candidate with its passes in ascending order, as far as that fits and costs nothing.

    Searches put a rank's largest pass first, where it needs the least memory.
    """
    batches, shares = candidate.micro_batches, candidate.shares
    if costs.synchronizes_every_pass:
        usual, costliest = costs.schedules
        columns = list(zip(*batches, strict=True))
        ends = len(columns) if usual == costliest else len(columns) - 1
        begin = len(columns) - ends if costs.costliest_comes_first else 0
        columns[begin : begin + ends] = sorted(columns[begin : begin + ends], key=sum)
        ascending = tuple(zip(*columns, strict=True))
        fits = shortfall_of(costs, ascending, shares) is None
        return candidate._replace(micro_batches=ascending) if fits else candidate

    def ascending_on(rank: int, own: tuple[int, ...], share: float) -> tuple[int, ...]:
        sorted_ = (*sorted(own[:-1]), *own[-1:]) if costs.overlaps else tuple(sorted(own))
        return sorted_ if costs.memories[rank].fits(Caps.of(sorted_), share) else own

    return candidate._replace(micro_batches=tuple(costs.by_rank(ascending_on, batches, shares)))


def fastest(*candidates: Candidate) -> Candidate:
    """The first of those with the fewest seconds."""
    return min(candidates, key=lambda candidate: candidate.seconds)
