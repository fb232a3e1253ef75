"""The fastest plan of one stage: branch and bound over the shares of the ranks.

Memory couples batches and shares: the larger a rank's share, the smaller its passes (`Caps`). A
node bounds every rank's share from below and above. Its relaxation lets batches use the memory
beside the lower bounds and shares go up to the upper ones; then both are easy to solve, and their
step bounds every plan of the node from below. If the relaxed plan does not fit, the node is split
at the share of a rank that holds too much. A pass that is the only one of its step needs less
memory: where all ranks run equally many passes, plans of one pass and of several are different
nodes. There a node also has a range of numbers of passes, and its relaxation holds only what all
ranks together hold in so many passes.

The result is deterministic: the search stops after a number of nodes, not after a time.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from poplar.planner.batch_allocation import (
    IndependentPasses,
    MicroBatches,
    Split,
    SynchronizedPasses,
)
from poplar.planner.cost_model import StageCosts, map_distinct
from poplar.planner.heuristic import (
    Alternation,
    Candidate,
    fastest,
    with_smaller_passes_first,
)
from poplar.planner.memory_model import Caps
from poplar.planner.memory_shortfall import Request, largest_shares
from poplar.planner.shard_allocation import Shared, ShareProblem
from poplar.planner.share_limits import ShareLimits, hull_of_step, suffice
from poplar.values.plan import Plan

TOLERANCE = 1e-10
"""Relative difference below which two steps are equally fast."""
_MOST_WORK = 1200
"""Nodes times ranks."""
_NODES_BEFORE_SETTLING = 20
_SETTLED = 1e-3
"""After so many nodes, alternations find nothing new, and a plan that is proven to be this close to
the fastest is good enough."""

_SIMILAR = 1.1
"""Ranges of numbers of passes with a smaller ratio are not split further."""


class Decision(NamedTuple):
    """A plan, and seconds that no plan is faster than; None: unknown."""

    plan: Plan
    bound: float | None = None


class Relaxed(NamedTuple):
    """A lower bound on the steps of a node, and a plan that may need too much memory."""

    bound: float
    micro_batches: MicroBatches
    shares: tuple[float, ...]
    passes: tuple[int, int] | None = None
    """As those of the node, or fewer."""
    whole: tuple[float, ...] = ()
    """The best shares if every rank's room holds whole samples; empty: not known."""


def fastest_plan(costs: StageCosts, request: Request, *, effort: float = 1.0) -> Decision:
    """The fastest plan of one stage. There must be no `memory_shortfall`.

    Args:
        costs: of the stage.
        request: what the plan is for.
        effort: the part of the usual number of nodes that may be searched.
    """
    solvers = Alternation(costs, request)
    best = solvers.first_plan()
    bound = best.seconds
    if costs.shares_matter:
        best, bound = _Search(solvers, best, effort).run()
    assert best.micro_batches, "a stage without a memory shortfall has a plan"
    best = with_smaller_passes_first(costs, best)
    plan = Plan(
        stage=costs.stage,
        global_batch=request.global_batch,
        micro_batches=best.micro_batches,
        shares=best.shares,
    )
    return Decision(plan, bound)


class _Node(NamedTuple):
    """Bounds on every rank's share."""

    floor: tuple[float, ...]
    """Shares are larger than this. -1: nothing is known."""
    upper: tuple[float, ...]
    caps: tuple[Caps, ...]
    """The largest micro-batches beside the floor."""
    passes: tuple[int, int] | None = None
    """The least and the most passes of a step, where all ranks run equally many. None: any, and
    memory does not couple the ranks' micro-batches."""


class _Search:
    """Best-first branch and bound."""

    def __init__(self, solvers: Alternation, first: Candidate, effort: float) -> None:
        self._solvers = solvers
        self._most_nodes = 1 + int(effort * _MOST_WORK / solvers.costs.cluster.world_size)
        self._costs = solvers.costs
        self._best = first
        self._below = solvers.request.below
        self._nodes: list[tuple[float, int, _Node, Relaxed]] = []
        """A heap by bound."""
        self._number = count()

    def run(self) -> tuple[Candidate, float]:
        """The fastest plan found, and a lower bound on the step of any plan."""
        for node in self._roots():
            self._add(node)
        closed = math.inf
        """The smallest bound of nodes that cannot be split."""
        for done in range(self._most_nodes):
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
        return self._best, min([closed, self._best.seconds, self._below, *queued])

    def _limit(self, tolerance: float = TOLERANCE) -> float:
        """Nodes whose bound is not below these seconds cannot improve the best plan."""
        return min(self._best.seconds, self._below) * (1.0 - tolerance)

    def _roots(self) -> Iterator[_Node]:
        """The nodes that together hold every plan."""
        ranks, most = self._costs.cluster.world_size, self._solvers.request.max_micro_batch
        floor = (-1.0,) * ranks
        caps = self._costs.by_rank(lambda rank: self._costs.memories[rank].caps_above(-1.0, most))
        if not self._costs.synchronizes_every_pass:
            kinds = [(caps, [Caps(0)] * ranks)]
        else:
            one_pass = [Caps(cap.first) for cap in caps]
            kinds = [(one_pass, [Caps(0)] * ranks), (caps, [Caps(0, 0)] * ranks)]
        for largest, least in kinds:
            upper = largest_shares(self._costs, least)
            yield _Node(floor, tuple(upper), tuple(largest))

    def _add(self, node: _Node) -> None:
        """Solve a node's relaxation; queue the node unless its bound rules it out."""
        if not suffice(node.upper) or any(map(operator.le, node.upper, node.floor)):
            return
        node = self._tightened(node)
        if min(cap.first for cap in node.caps) < 0:
            return
        relaxed = self._relaxed(node)
        if relaxed is None or relaxed.bound >= self._limit():
            return
        number = next(self._number)
        for shares in filter(None, (relaxed.shares, relaxed.whole)):
            if number < _NODES_BEFORE_SETTLING:
                self._best = fastest(self._best, self._solvers.alternate(shares))
        if number < _NODES_BEFORE_SETTLING or self._excess(relaxed) is None:
            self._best = fastest(self._best, self._solvers.best_shares(relaxed.micro_batches))
        if relaxed.bound < self._limit():
            heapq.heappush(self._nodes, (relaxed.bound, number, node, relaxed))

    def _tightened(self, node: _Node) -> _Node:
        """The node with caps that its shares allow."""
        total, most = math.fsum(node.upper), self._solvers.request.max_micro_batch

        def caps_of(rank: int, floor: float, upper: float, caps: Caps) -> Caps:
            memory = self._costs.memories[rank]
            above = memory.caps_above(floor, most)
            beside = memory.largest_caps(max(0.0, 1.0 - (total - upper)), most)
            return Caps(*map(min, caps, above, beside))

        return node._replace(
            caps=tuple(self._costs.by_rank(caps_of, node.floor, node.upper, node.caps))
        )

    def _relaxed(self, node: _Node) -> Relaxed | None:
        """The relaxation of a node, or None if it is not faster than the best plan."""
        if node.passes is None:
            batches = self._solvers.batches.under(node.caps)
            problem = ShareProblem(self._costs, node.upper)
            if isinstance(batches, IndependentPasses):
                return self._relaxed_independent(batches, problem)
            return self._relaxed_synchronized(batches, problem)
        return self._relaxed_together(node, node.passes)

    def _relaxed_together(self, node: _Node, passes: tuple[int, int]) -> Relaxed | None:
        """The relaxation of a node whose ranks hold the samples of some passes together."""
        total = self._solvers.request.global_batch
        fewest, most = passes
        first = self._share_limits(node, total)
        if first.most < 0:
            return None
        later: ShareLimits | None = None
        if most > 1:
            later = self._share_limits(node, total, later=True)
            rest = max(1, total - first.most)
            fewest = max(fewest, 1 - rest // -later.most if later.most > 0 else most + 1)
        if fewest > most or (later is None and first.most < total):
            return None
        hulls = self._costs.by_rank(
            lambda _, ones, others: hull_of_step(ones, others, most, total),
            first.by_rank,
            later.by_rank if later else [()] * len(node.caps),
        )
        batches = self._solvers.batches.within(first, later)
        problem = ShareProblem(self._costs, node.upper, hulls, total)
        passes = fewest, most
        relaxed = self._relaxed_synchronized(batches, problem, passes if later else None)
        if relaxed is None:
            return None
        return relaxed._replace(passes=passes, whole=self._whole(batches, relaxed, first, later))

    def _whole(
        self,
        batches: SynchronizedPasses,
        relaxed: Relaxed,
        first: ShareLimits,
        later: ShareLimits | None,
    ) -> tuple[float, ...]:
        """The best shares beside whole samples, about as many as fit beside the relaxed shares."""
        total, passes = self._solvers.request.global_batch, len(relaxed.micro_batches[0])
        columns = later or first
        needed = -(-total // passes)
        beside = columns.samples_beside(relaxed.shares)
        samples = list(map(math.floor, beside))
        order = sorted(range(len(samples)), key=lambda rank: samples[rank] - beside[rank])
        missing = needed - sum(samples)
        for rank in order[: max(0, missing)]:
            samples[rank] = min(samples[rank] + 1, len(columns.by_rank[rank]) - 1)
        upper = [own[number] for own, number in zip(columns.by_rank, samples, strict=True)]
        if not suffice(upper):
            return ()
        sizes = list(map(sum, zip(*relaxed.micro_batches, strict=True)))
        return ShareProblem(self._costs, upper).cheapest(batches.synchronizations(sizes)).shares

    def _share_limits(self, node: _Node, at_most: int, *, later: bool = False) -> ShareLimits:
        """Those of passes under the bounds of a node."""

        def largest_shares(rank: int, caps: Caps, upper: float) -> tuple[float, ...]:
            largest = self._costs.memories[rank].largest_shares(caps[later], later=later)
            return tuple(min(upper, share) for share in largest)

        return ShareLimits(self._costs.by_rank(largest_shares, node.caps, node.upper), at_most)

    def _relaxed_synchronized(
        self,
        batches: SynchronizedPasses,
        problem: ShareProblem,
        passes: tuple[int, int] | None = None,
    ) -> Relaxed | None:
        """A lower bound by linear programs, and a plan by alternation from two starts."""
        if not batches.is_feasible:
            return None
        box = least, _ = problem.least_communication(), problem.most_communication()
        if math.isinf(least.reduce):
            return None
        bounds = batches.lower_bounds(*box, passes)
        lowest = problem.lowest(next(bounds))
        bound = max([lowest.seconds, *(problem.lowest(own).seconds for own in bounds)])
        if bound >= self._limit():
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
                shared = problem.cheapest(batches.synchronizations(following))
                if shared.seconds < best:
                    best, sizes, shares = shared.seconds, following, shared.shares
                following = batches.cheapest_sizes(self._costs.communication(shared.shares))
        if passes is None:
            bound = min(bound, best)
        return Relaxed(bound, batches.micro_batches(sizes), shares)

    def _relaxed_independent(
        self, batches: IndependentPasses, problem: ShareProblem
    ) -> Relaxed | None:
        """Exact: few splits matter, and each has its own best shares."""
        communication, tail = problem.least_communication(), problem.least_tail()
        limit = self._limit()
        best: tuple[Split, Shared] | None = None
        splits = batches.splits(communication, limit=lambda: limit - tail)
        for split in splits:
            seconds = self._costs.schedule.seconds(split.synchronization, communication)
            if seconds + tail < limit:
                shared = problem.cheapest({(split.synchronization, True): 1})
                if shared.seconds < limit:
                    best = split, shared
                    limit = shared.seconds * (1.0 - TOLERANCE)
        if best is None:
            return None
        split, shared = best
        ranks = self._costs.cluster.world_size
        return Relaxed(shared.seconds, split.micro_batches(ranks), shared.shares)

    def _split(self, node: _Node, relaxed: Relaxed) -> list[_Node]:
        """Nodes that together hold every plan of this one, but not its relaxed plan."""
        rank = self._excess(relaxed)
        if rank is None:
            return []
        if self._costs.synchronizes_every_pass:
            total = self._solvers.request.global_batch
            if node.passes is None:
                has_one_pass = all(cap.later < 0 for cap in node.caps)
                return [node._replace(passes=(1, 1) if has_one_pass else (2, total))]
            least, most = relaxed.passes or node.passes
            used = len(relaxed.micro_batches[0])
            if least <= used < most or most > _SIMILAR * least + 1:
                middle = used if least <= used < most else int(_SIMILAR * least)
                return [
                    node._replace(passes=(least, middle)),
                    node._replace(passes=(middle + 1, most)),
                ]
        # Between the share beside which the used caps fit, and the relaxed one.
        caps = Caps.of(relaxed.micro_batches[rank])
        share = self._costs.memories[rank].middle_share(caps, relaxed.shares[rank])
        # Exchanging equal ranks of a host changes no step, so only ascending shares are searched.
        # Between hosts it may: collectives depend on what every host owns.
        groups = self._costs.cluster.exchangeable_groups
        floor, upper = list(node.floor), list(node.upper)
        for other, group in enumerate(groups):
            if group == groups[rank]:
                if other >= rank:
                    floor[other] = max(floor[other], share)
                if other <= rank:
                    upper[other] = min(upper[other], share)
        return [node._replace(floor=tuple(floor)), node._replace(upper=tuple(upper))]

    def _excess(self, relaxed: Relaxed) -> int | None:
        """The rank that lacks the most memory in a relaxed plan; None: it fits."""

        def excess(rank: int, caps: Caps, share: float) -> float:
            memory = self._costs.memories[rank]
            return 0.0 if memory.fits(caps, share) else memory.needed(caps, share) / memory.limit

        used = map_distinct(Caps.of, relaxed.micro_batches)
        excesses = self._costs.by_rank(excess, used, relaxed.shares)
        rank = excesses.index(max(excesses))
        return rank if excesses[rank] else None
