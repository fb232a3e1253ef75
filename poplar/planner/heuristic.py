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
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import largest_shares, smallest_shares
from poplar.planner.rank_groups import map_distinct
from poplar.planner.shard_allocation import ShareProblem


class Request(NamedTuple):
    """What a plan is searched for."""

    global_batch: int
    max_micro_batch: int
    """Largest micro-batch that is allowed on any rank."""


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
        """The better plan of two: from even shares, and from those that need the least memory."""
        ranks = self.costs.cluster.world_size
        even = (1.0 / ranks,) * ranks
        if not self.costs.shares_matter:
            return self.best_batches(even)
        return fastest(self.alternate(even), self.alternate(smallest_shares(self.costs)[0]))

    def alternate(self, shares: Sequence[float]) -> Candidate:
        """The best batches for these shares, with the best shares for those batches."""
        found = self.best_batches(shares)
        if found is NOTHING_FITS:
            return found
        return fastest(found, self.best_shares(found.micro_batches))

    def best_batches(self, shares: Sequence[float]) -> Candidate:
        """The fastest plan with these shares."""
        caps = self.largest_batches(shares)
        if min(caps) < 0 or max(caps) < 1:
            return NOTHING_FITS
        solver = self.batches.under(caps)
        return self._candidate(solver.cheapest(self.costs.communication(shares)), shares)

    def best_shares(self, micro_batches: MicroBatches) -> Candidate:
        """The fastest plan with these batches."""
        upper = largest_shares(self.costs, largest_batches_of(micro_batches))
        problem = ShareProblem(self.costs, upper)
        if not problem.is_feasible:
            return NOTHING_FITS
        shared = problem.cheapest(self.costs.synchronizations(micro_batches))
        return self._candidate(micro_batches, shared.shares)

    def largest_batches(self, shares: Sequence[float]) -> tuple[int, ...]:
        """By rank, the largest micro-batch that fits beside its share; -1: not even none does."""
        memories, at_most = self.costs.memories, self.request.max_micro_batch
        return tuple(
            self.costs.by_rank(lambda rank, own: memories[rank].largest_batch(own, at_most), shares)
        )

    def _candidate(self, micro_batches: MicroBatches, shares: Sequence[float]) -> Candidate:
        seconds = self.costs.step_seconds(micro_batches, shares)
        return Candidate(seconds, micro_batches, tuple(shares))


def largest_batches_of(micro_batches: MicroBatches) -> list[int]:
    """By rank, its largest micro-batch; 0 if it has none."""
    return map_distinct(lambda passes: max(passes, default=0), micro_batches)


def fastest(*candidates: Candidate) -> Candidate:
    """The first of those with the fewest seconds."""
    return min(candidates, key=lambda candidate: candidate.seconds)
