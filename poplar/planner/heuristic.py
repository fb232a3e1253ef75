"""The first plan of a stage: alternate the best batches for given shares and the best shares for
given batches.

Each half is exact, so every round is at least as fast as the one before, and every result fits in
memory. Branch and bound starts from this plan; `benchmarks/search.py` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from poplar.planner.batch_allocation import BatchAllocator, MicroBatches
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import smallest_shares, suffice
from poplar.planner.rank_groups import map_distinct
from poplar.planner.shard_allocation import ShareProblem

_ROUNDS = 3
"""More rounds do not make a step faster by more than 0.01 %."""


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


class Alternation:
    """Solvers for one stage: the best batches for given shares, and the best shares for batches."""

    def __init__(self, costs: StageCosts, request: Request) -> None:
        self.costs = costs
        self.request = request
        self.batches = BatchAllocator(costs, request.global_batch)
        self.groups = costs.cluster.device_group_indices
        """By rank, a number that ranks with equal devices share."""
        self.memory_of_group = dict(zip(self.groups, costs.memories, strict=True))

    def first_plan(self) -> Candidate | None:
        """The better of two alternations: from even shares, and from shares by free memory."""
        even = (1.0 / len(self.groups),) * len(self.groups)
        if not self.costs.shares_matter:
            return self.best_batches(even)
        starts = (even, self._shares_by_memory())
        found = [candidate for shares in starts if (candidate := self.alternate(shares))]
        return min(found, key=lambda candidate: candidate.seconds, default=None)

    def alternate(self, shares: Sequence[float]) -> Candidate | None:
        """A plan reached from these shares, or None if no batches fit beside them."""
        best = None
        for _ in range(_ROUNDS):
            found = self.best_batches(shares)
            if found is None or (best is not None and found.seconds >= best.seconds):
                break
            best = found
            improved = self.best_shares(found.micro_batches)
            if improved is None or improved.seconds >= best.seconds:
                break
            best, shares = improved, improved.shares
        return best

    def best_batches(self, shares: Sequence[float]) -> Candidate | None:
        """The fastest plan with these shares, or None if no batches fit beside them."""
        caps = self.largest_batches(shares)
        if min(caps) < 0 or max(caps) < 1:
            return None
        solver = self.batches.under(caps)
        return self._candidate(solver.cheapest(self.costs.communication(shares)), shares)

    def best_shares(self, micro_batches: MicroBatches) -> Candidate | None:
        """The fastest plan with these batches, or None if no shares fit beside them."""
        upper = self.largest_shares(largest_batches_of(micro_batches))
        problem = ShareProblem(self.costs, upper)
        if not problem.is_feasible:
            return None
        shared = problem.cheapest(self.costs.synchronizations(micro_batches))
        return self._candidate(micro_batches, shared.shares)

    def largest_shares(self, batches: Sequence[int]) -> list[float]:
        """By rank, the largest share that fits beside a micro-batch; -inf: not even none does."""

        def largest(group_and_batch: tuple[int, int]) -> float:
            group, batch = group_and_batch
            return self.memory_of_group[group].largest_share(batch)

        return map_distinct(largest, list(zip(self.groups, batches, strict=True)))

    def largest_batches(self, shares: Sequence[float]) -> tuple[int, ...]:
        """By rank, the largest micro-batch that fits beside its share; -1: not even none does."""

        def largest(group_and_share: tuple[int, float]) -> int:
            group, share = group_and_share
            return self.memory_of_group[group].largest_batch(share, self.request.max_micro_batch)

        return tuple(map_distinct(largest, list(zip(self.groups, shares, strict=True))))

    def _candidate(self, micro_batches: MicroBatches, shares: Sequence[float]) -> Candidate:
        seconds = self.costs.step_seconds(micro_batches, shares)
        return Candidate(seconds, micro_batches, tuple(shares))

    def _shares_by_memory(self) -> tuple[float, ...]:
        """Shares in proportion to the memory that is free beside one sample.

        If a rank cannot hold a sample: the shares of the plan that needs the least memory.
        """
        free = map_distinct(lambda group: self.memory_of_group[group].largest_share(1), self.groups)
        if min(free) < 0.0 or not suffice(free):
            return smallest_shares(self.costs)[0]
        total = math.fsum(free)
        return tuple(part / total for part in free)


def largest_batches_of(micro_batches: MicroBatches) -> list[int]:
    """By rank, its largest micro-batch; 0 if it has none."""
    return map_distinct(lambda passes: max(passes, default=0), micro_batches)
