"""Rounding a plan to a simpler one: even shares, fewer equal passes, fewer persistent units.

Measurements do not resolve differences below `PREFERENCE`, so among plans that are predicted within
it the simplest one is chosen. The rounded plan always fits in memory.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left

from poplar.plan import Plan, spread
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.heuristic import Alternation, Candidate, Request
from poplar.planner.persistent_units import persistence_order, unit_plans
from poplar.planner.rank_groups import group_equal
from poplar.profile import ClusterProfile

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
    costs = costs_of(cluster, plan)
    request = Request(plan.global_batch, max_micro_batch or plan.global_batch)
    solvers = Alternation(costs, request)
    seconds = costs.step_seconds(plan.micro_batches, plan.shares)
    limit = seconds * (1.0 + preference + _ROUNDING)
    chosen = _with_even_shares(solvers, Candidate(seconds, plan.micro_batches, plan.shares), limit)
    chosen = _with_fewer_passes(solvers, chosen, limit, preference)
    simpler = _with_fewer_persistent_units(costs, chosen, limit)
    if chosen[1:] == (plan.micro_batches, plan.shares) and simpler == costs:
        return plan
    return dataclasses.replace(
        plan,
        micro_batches=chosen.micro_batches,
        shares=chosen.shares,
        units=unit_plans(simpler),
        prediction=None,
    )


def _with_even_shares(solvers: Alternation, candidate: Candidate, limit: float) -> Candidate:
    ranks = len(candidate.shares)
    even = solvers.best_batches((1.0 / ranks,) * ranks)
    return even if even is not None and even.seconds <= limit else candidate


def _with_fewer_passes(
    solvers: Alternation, candidate: Candidate, limit: float, preference: float
) -> Candidate:
    if solvers.costs.synchronizes_every_pass:
        return _with_fewer_synchronizations(solvers, candidate, limit)
    return _with_fewer_passes_per_rank(solvers, candidate, limit, preference)


def _with_fewer_synchronizations(
    solvers: Alternation, candidate: Candidate, limit: float
) -> Candidate:
    """The same samples per rank, spread evenly over the fewest passes."""
    caps = solvers.largest_batches(candidate.shares)
    for passes in range(1, len(candidate.micro_batches[0])):
        batches = tuple(spread(sum(own), passes) for own in candidate.micro_batches)
        if any(own[-1] > cap for own, cap in zip(batches, caps, strict=True)):
            continue
        seconds = solvers.costs.step_seconds(batches, candidate.shares)
        if seconds <= limit:
            return Candidate(seconds, batches, candidate.shares)
    return candidate


def _with_fewer_passes_per_rank(
    solvers: Alternation, candidate: Candidate, limit: float, preference: float
) -> Candidate:
    """Fewer equal passes on each rank whose compute becomes at most `preference` longer."""
    costs, caps = solvers.costs, solvers.largest_batches(candidate.shares)
    slack = limit - candidate.seconds
    ((latest, reducible),) = costs.synchronizations(candidate.micro_batches)
    batches = list(candidate.micro_batches)
    for ranks in group_equal(zip(solvers.groups, batches, caps, strict=True)):
        rank = ranks[0]
        longest = costs.synchronization([(rank, batches[rank])]).latest * (1.0 + preference)
        for passes in range(-(-sum(batches[rank]) // max(1, caps[rank])), len(batches[rank])):
            fewer = spread(sum(batches[rank]), passes)
            own = costs.synchronization([(rank, fewer)])
            is_late = own.latest > min(longest * (1.0 + _ROUNDING), latest + slack)
            if not is_late and (own.reducible <= reducible + slack or not costs.overlaps):
                for equal in ranks:
                    batches[equal] = fewer
                break
    simpler = tuple(batches)
    return Candidate(costs.step_seconds(simpler, candidate.shares), simpler, candidate.shares)


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
