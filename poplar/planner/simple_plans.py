"""Rounding a plan to a simpler one: even shares, fewer equal passes, fewer persistent units.

With the batches and shares of the rounded plan, ranks recompute only as many units as needed.

Measurements do not resolve differences below `PREFERENCE`, so among plans that are predicted within
it the simplest one is chosen. The rounded plan always fits in memory.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left

from poplar.planner.cost_model import StageCosts, costs_of, under_plan
from poplar.planner.heuristic import Alternation, Candidate, with_smaller_passes_first
from poplar.planner.memory_model import Caps
from poplar.planner.memory_shortfall import Request, shortfall_of
from poplar.planner.persistent_units import persistence_order, unit_plans
from poplar.planner.saved_memory import with_fewest_recomputed_units
from poplar.values.plan import Plan, spread
from poplar.values.profile import ClusterProfile

PREFERENCE = 0.02
"""A simpler plan is chosen if its predicted step is at most this fraction slower."""
_ROUNDING = 1e-12


def simplified(
    cluster: ClusterProfile,
    plan: Plan,
    preference: float = PREFERENCE,
    *,
    max_micro_batch: int | None = None,
) -> Plan:
    """The simplest plan whose predicted step is at most `preference` slower than that of `plan`.

    Args:
        cluster: the profile that predicts.
        plan: a plan that fits in memory.
        preference: allowed slowdown, as a fraction of the step.
        max_micro_batch: largest micro-batch of the simpler plan; None: what was measured.

    Returns:
        `plan` itself if no simpler plan is fast enough; otherwise a plan without a prediction.
    """
    cluster = under_plan(cluster, plan)
    costs = costs_of(cluster, plan)
    request = Request(plan.global_batch, max_micro_batch or plan.global_batch)
    solvers = Alternation(costs, request)
    seconds = costs.step_seconds(plan.micro_batches, plan.shares)
    limit = seconds * (1.0 + preference + _ROUNDING)
    chosen = Candidate(seconds, plan.micro_batches, plan.shares)
    even = solvers.best_batches(cluster.even_shares)
    if even.seconds <= limit:
        chosen = with_smaller_passes_first(costs, even)
    if costs.synchronizes_every_pass:
        chosen = _with_fewer_synchronizations(solvers, chosen, limit)
    else:
        chosen = _with_fewer_passes(solvers, chosen, limit, preference)
    simpler = _with_fewer_persistent_units(costs, chosen, limit)
    changed = dataclasses.replace(
        plan,
        micro_batches=chosen.micro_batches,
        shares=chosen.shares,
        units=unit_plans(simpler),
        prediction=None,
    )
    if simpler.recomputed:
        simpler = with_fewest_recomputed_units(cluster, simpler, changed)
    if chosen[1:] == (plan.micro_batches, plan.shares) and simpler == costs:
        return plan
    return dataclasses.replace(changed, units=unit_plans(simpler))


def _with_fewer_synchronizations(
    solvers: Alternation, candidate: Candidate, limit: float
) -> Candidate:
    """The same samples per rank, spread evenly over the fewest passes."""
    costs, shares = solvers.costs, candidate.shares
    samples = list(map(sum, candidate.micro_batches))
    fewest = max(map(_fewest, samples, solvers.largest_caps(shares)))
    for passes in range(fewest, len(candidate.micro_batches[0])):
        batches = tuple(spread(own, passes) for own in samples)
        if shortfall_of(costs, batches, shares) is None:
            seconds = costs.step_seconds(batches, shares)
            if seconds <= limit:
                return Candidate(seconds, batches, shares)
    return candidate


def _fewest(samples: int, caps: Caps) -> int:
    """No fewer passes hold these samples."""
    return max(1, math.ceil(samples / max(1, *caps)))


def _with_fewer_passes(
    solvers: Alternation, candidate: Candidate, limit: float, preference: float
) -> Candidate:
    """Fewer equal passes on each rank whose compute becomes at most `preference` longer."""
    costs, caps = solvers.costs, solvers.largest_caps(candidate.shares)
    slack = limit - candidate.seconds
    ((latest, reducible),) = costs.synchronizations(candidate.micro_batches)

    def fewer(rank: int, own: tuple[int, ...], cap: Caps, share: float) -> tuple[int, ...]:
        samples, memory = sum(own), costs.memories[rank]
        longest = costs.synchronization([(rank, own)]).latest * (1.0 + preference + _ROUNDING)
        for passes in range(_fewest(samples, cap), len(own)):
            even = spread(samples, passes)
            if not memory.fits(Caps.of(even), share):
                continue
            ready = costs.synchronization([(rank, even)])
            is_late = ready.latest > min(longest, latest + slack)
            if not is_late and (ready.reducible <= reducible + slack or not costs.overlaps):
                return even
        return own

    batches = tuple(costs.by_rank(fewer, candidate.micro_batches, caps, candidate.shares))
    return Candidate(costs.step_seconds(batches, candidate.shares), batches, candidate.shares)


def _with_fewer_persistent_units(
    costs: StageCosts, candidate: Candidate, limit: float
) -> StageCosts:
    """The costs with the fewest persistent units that are fast enough."""
    order = [unit for unit in persistence_order(costs.cluster.model) if unit in costs.persistent]

    def with_first(number: int) -> StageCosts:
        return dataclasses.replace(costs, persistent=frozenset(order[:number]))

    def is_fast_enough(number: int) -> bool:
        seconds = with_first(number).step_seconds(candidate.micro_batches, candidate.shares)
        return seconds <= limit

    return with_first(bisect_left(range(len(order)), True, key=is_fast_enough))
