"""The fastest plan of one stage: branch and bound over the largest micro-batch of every rank.

Memory couples batches and shares: the larger a rank's largest micro-batch (its cap), the less of
the state it can own. A node bounds every rank's cap from below and above. Its relaxation lets
batches use the upper caps and shares the memory beside the lower caps; then both are easy to solve,
and their step bounds every plan of the node from below. If the relaxed plan does not fit, the node
is split at the cap of a rank that holds too much.

The result is deterministic: the search stops after a number of nodes, not after a time.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from poplar.plan import Plan
from poplar.planner.batch_allocation import IndependentPasses, MicroBatches, SynchronizedPasses
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Alternation, Candidate, Request, fastest, largest_batches_of
from poplar.planner.memory_shortfall import largest_shares, suffice
from poplar.planner.shard_allocation import ShareProblem

TOLERANCE = 1e-10
"""Relative difference below which two steps are equally fast."""
_MOST_WORK = 1200
"""Nodes times ranks."""
_NODES_BEFORE_SETTLING = 40
_SETTLED = 1e-3
"""After so many nodes, alternations find nothing new, and a plan that is proven to be this close to
the fastest is good enough."""


class Decision(NamedTuple):
    """A plan, and seconds that no plan is faster than; None: unknown."""

    plan: Plan
    bound: float | None = None


class Relaxed(NamedTuple):
    """A lower bound on the steps of a node, and a plan that may need too much memory."""

    bound: float
    micro_batches: MicroBatches
    shares: tuple[float, ...]


def fastest_plan(costs: StageCosts, request: Request) -> Decision:
    """The fastest plan of one stage. There must be no `memory_shortfall`."""
    solvers = Alternation(costs, request)
    best = solvers.first_plan()
    bound = best.seconds
    if costs.shares_matter:
        best, bound = _Search(solvers, best).run()
    assert best.micro_batches, "a stage without a memory shortfall has a plan"
    plan = Plan(
        stage=costs.stage,
        global_batch=request.global_batch,
        micro_batches=best.micro_batches,
        shares=best.shares,
    )
    return Decision(plan, bound)


class _Node(NamedTuple):
    """Bounds on every rank's cap."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class _Search:
    """Best-first branch and bound."""

    def __init__(self, solvers: Alternation, first: Candidate) -> None:
        self._solvers = solvers
        self._costs = solvers.costs
        self._best = first
        self._nodes: list[tuple[float, int, _Node, Relaxed]] = []
        """A heap by bound."""
        self._number = count()

    def run(self) -> tuple[Candidate, float]:
        """The fastest plan found, and a lower bound on the step of any plan."""
        devices, largest = self._costs.cluster.devices, self._solvers.request.max_micro_batch
        high = tuple(min(largest, device.max_batch) for device in devices)
        self._add(_Node(low=(0,) * len(devices), high=high))
        closed = math.inf
        """The smallest bound of nodes that cannot be split."""
        for done in range(_MOST_WORK // self._costs.cluster.world_size + 1):
            tolerance = _SETTLED if done >= _NODES_BEFORE_SETTLING else TOLERANCE
            if not self._nodes or self._nodes[0][0] >= self._limit(tolerance):
                break
            _, _, node, relaxed = heapq.heappop(self._nodes)
            children = self._split(node, relaxed)
            if not children:
                closed = min(closed, relaxed.bound)
            for child in children:
                self._add(child)
        queued = [bound for bound, *_ in self._nodes[:1]]
        return self._best, min([closed, self._best.seconds, *queued])

    def _limit(self, tolerance: float = TOLERANCE) -> float:
        """Nodes whose bound is not below these seconds cannot improve the best plan."""
        return self._best.seconds * (1.0 - tolerance)

    def _add(self, node: _Node) -> None:
        """Solve a node's relaxation; queue the node unless its bound rules it out."""
        upper = largest_shares(self._costs, node.low)
        if not suffice(upper):
            return
        node = self._tightened(node, upper)
        if max(node.high) < 1 or any(map(operator.lt, node.high, node.low)):
            return
        relaxed = self._relaxed(node, ShareProblem(self._costs, upper))
        if relaxed is None or relaxed.bound >= self._limit():
            return
        self._best = fastest(self._best, self._solvers.best_shares(relaxed.micro_batches))
        number = next(self._number)
        if number < _NODES_BEFORE_SETTLING:
            self._best = fastest(self._best, self._solvers.alternate(relaxed.shares))
        if relaxed.bound < self._limit():
            heapq.heappush(self._nodes, (relaxed.bound, number, node, relaxed))

    def _tightened(self, node: _Node, upper: Sequence[float]) -> _Node:
        """The node without caps that no shares up to these allow."""
        total = math.fsum(upper)

        def largest_batch(rank: int, own: float, high: int) -> int:
            least = max(0.0, 1.0 - (total - own))
            return self._costs.memories[rank].largest_batch(least, high)

        high = self._costs.by_rank(largest_batch, upper, node.high)
        return node._replace(high=tuple(high))

    def _relaxed(self, node: _Node, problem: ShareProblem) -> Relaxed | None:
        """The relaxation of a node, or None if it is not faster than the best plan."""
        batches = self._solvers.batches.under(node.high)
        if isinstance(batches, SynchronizedPasses):
            return self._relaxed_synchronized(batches, problem)
        return self._relaxed_independent(batches, problem)

    def _relaxed_synchronized(
        self, batches: SynchronizedPasses, problem: ShareProblem
    ) -> Relaxed | None:
        """A lower bound by one linear program, and a plan by alternation from two starts."""
        least = problem.least_communication()
        lowest = problem.lowest(batches.lower_bounds(least, problem.most_communication()))
        if lowest.seconds >= self._limit():
            return None
        starts = [
            batches.cheapest_sizes(least),
            batches.cheapest_sizes(self._costs.communication(lowest.shares)),
        ]
        best, sizes, shares = self._limit(), starts[0], lowest.shares
        tried: set[tuple[int, ...]] = set()
        for following in starts:
            while following not in tried:
                tried.add(following)
                synchronizations = [batches.synchronization(size) for size in following]
                shared = problem.cheapest(synchronizations)
                if shared.seconds < best:
                    best, sizes, shares = shared.seconds, following, shared.shares
                following = batches.cheapest_sizes(self._costs.communication(shared.shares))
        return Relaxed(min(lowest.seconds, best), batches.micro_batches(sizes), shares)

    def _relaxed_independent(
        self, batches: IndependentPasses, problem: ShareProblem
    ) -> Relaxed | None:
        """Exact: few splits matter, and each has its own best shares."""
        communication, tail = problem.least_communication(), problem.least_tail()
        limit, best = self._limit(), None
        splits = batches.splits(communication, limit=lambda: limit - tail)
        for split in splits:
            seconds = self._costs.schedule.seconds(split.synchronization, communication)
            if seconds + tail < limit:
                shared = problem.cheapest([split.synchronization])
                if shared.seconds < limit:
                    best = Relaxed(shared.seconds, split.micro_batches, shared.shares)
                    limit = shared.seconds * (1.0 - TOLERANCE)
        return best

    def _split(self, node: _Node, relaxed: Relaxed) -> list[_Node]:
        """Nodes that together hold every plan of this one, but not its relaxed plan."""
        memories, largest = self._costs.memories, largest_batches_of(relaxed.micro_batches)

        def excess(rank: int, used: int, share: float) -> float:
            memory = memories[rank]
            return 0.0 if memory.fits(used, share) else memory.needed(used, share) / memory.limit

        excesses = self._costs.by_rank(excess, largest, relaxed.shares)
        rank = excesses.index(max(excesses))
        if not excesses[rank]:
            return []
        used, share = largest[rank], relaxed.shares[rank]
        # Halve the range between what fits beside the share and what the relaxed plan uses.
        cap = (memories[rank].largest_batch(share, used) + used + 1) // 2
        # Exchanging equal ranks changes no step, so only descending caps are searched.
        groups = self._costs.cluster.rank_group_indices
        equal = [other for other, group in enumerate(groups) if group == groups[rank]]
        high, low = list(node.high), list(node.low)
        for other in equal:
            if other >= rank:
                high[other] = min(high[other], cap - 1)
            if other <= rank:
                low[other] = max(low[other], cap)
        return [node._replace(high=tuple(high)), node._replace(low=tuple(low))]
