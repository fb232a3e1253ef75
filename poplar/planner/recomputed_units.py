"""How many units each rank recomputes in the backward, for the memory of larger batches.

Recomputation takes time and saves the memory of activations. A rank recomputes its first units: in
the backward they are the last, when the activations of all others are freed. Batches and shares are
searched for a few numbers of units, the same on all ranks. Then each rank recomputes only the
fewest units beside which they fit.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, step_seconds_of
from poplar.planner.memory_model import Caps, rank_memory
from poplar.planner.memory_shortfall import Request, Shortfall, memory_shortfall
from poplar.planner.persistent_units import fastest_plan_with_persistent_units, unit_plans
from poplar.planner.recomputed_curves import (
    recomputed_part,
    recomputing,
    saved_part,
    with_recomputed_parts,
)
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

_PARTS = (0.25, 0.5, 0.75, 1.0)
"""Of the units; numbers that are tried."""
_SETTLED = 1e-3
"""A plan that is proven to be this close to the fastest is good enough."""


def shortfall_with_recomputation(costs: StageCosts, request: Request) -> Shortfall | None:
    """What is missing at this stage if no rank recomputes units, or if all ranks recompute all
    units, whichever is less; None: a plan fits.

    Recomputation may need more memory than none, because its memory is not known by unit.

    Args:
        costs: without recomputation.
    """
    plain = memory_shortfall(costs, request)
    if plain is None or not costs.cluster.model.recomputable_units:
        return plain
    recomputed = memory_shortfall(_with_parts(costs, 0.0, 1.0), request)
    return recomputed and min(recomputed, plain, key=lambda one: one.total_bytes)


def fastest_plan_with_recomputation(costs: StageCosts, request: Request) -> Decision:
    """The fastest plan of one stage, with recomputed units where they make it faster.

    There must be one: no `shortfall_with_recomputation`.

    Args:
        costs: without recomputation.
        request: what the plan is for. A plan without recomputation is chosen if its step is slower
            by at most the preference.
    """
    best: Decision | None = None
    limit = math.inf
    if memory_shortfall(costs, request) is None:
        best = fastest_plan_with_persistent_units(costs, request)
        measured = any(device.recomputed_points for device in costs.cluster.devices)
        may_recompute = measured and costs.cluster.model.recomputable_units
        if not may_recompute or not memory_may_bind(costs, request):
            return best
        limit = step_seconds_of(costs.cluster, best.plan) / (1.0 + request.preference)
    bound = math.inf
    for part in (0.0, *_PARTS):
        # No plan is faster than with the memory of all recomputed units and the time of none.
        tried = _with_parts(costs, part, part or 1.0)
        if memory_shortfall(tried, request) is not None:
            continue
        below = min(request.below, limit)
        plan, least = fastest_plan_with_persistent_units(tried, request._replace(below=below))
        if not part:
            assert least is not None
            bound = least
        plan = _with_fewest_units(costs, plan)
        seconds = step_seconds_of(costs.cluster, plan)
        if seconds < limit:
            best, limit = Decision(plan, min(bound, seconds)), seconds
        if bound >= min(request.below, limit) * (1.0 - _SETTLED):
            break
    assert best is not None, "a stage without a memory shortfall has a plan"
    return best._replace(bound=min(bound, best.bound or 0.0))


def with_fewest_recomputed_units(
    cluster: ClusterProfile, costs: StageCosts, plan: Plan
) -> StageCosts:
    """The costs with the fewest of their recomputed units beside which a plan fits.

    Args:
        cluster: the profile, without recomputation.
        costs: of the plan's stage, persistent units and recomputed units.
        plan: its batches and shares fit with these.
    """
    model = cluster.model
    memories = StageCosts(cluster, costs.stage, costs.persistent).memories

    def fewest(rank: int) -> frozenset[int]:
        units, caps = sorted(costs.recomputed[rank]), Caps.of(plan.micro_batches[rank])

        def fits(number: int) -> bool:
            again = units[:number]
            parts = (recomputed_part(model, again), saved_part(model, again)) if again else (0, 0)
            device = recomputing(cluster.devices[rank], *parts)
            memory = dataclasses.replace(memories[rank], device=device)
            return memory.fits(caps, plan.shares[rank])

        number = 0 if fits(0) else 1 + bisect_left(range(1, len(units) + 1), True, key=fits)
        return frozenset(units[:number])

    return costs.with_recomputed(cluster, list(map(fewest, range(cluster.world_size))))


def _with_fewest_units(costs: StageCosts, plan: Plan) -> Plan:
    """A plan that fits if ranks recompute all units, with the fewest of them."""
    cluster = costs.cluster
    names, units = cluster.model.unit_names, frozenset(cluster.model.recomputable_units)
    every = [units if device.recomputed_points else frozenset[int]() for device in cluster.devices]
    persistent = frozenset(names.index(unit.name) for unit in plan.units if unit.persistent)
    full = dataclasses.replace(costs, persistent=persistent).with_recomputed(cluster, every)
    fewest = with_fewest_recomputed_units(cluster, full, plan)
    return dataclasses.replace(plan, units=unit_plans(fewest))


def _with_parts(costs: StageCosts, seconds: float, saved: float) -> StageCosts:
    """The seconds and the saved bytes of these parts of the units, on ranks that recompute."""
    model, order = costs.cluster.model, costs.cluster.model.recomputable_units
    again, less = (order[: math.ceil(part * len(order))] for part in (seconds, saved))
    parts = recomputed_part(model, again), saved_part(model, less)
    cluster = with_recomputed_parts(costs.cluster, [parts] * costs.cluster.world_size)
    return StageCosts(cluster, costs.stage)


def memory_may_bind(costs: StageCosts, request: Request) -> bool:
    """Whether a rank cannot hold everything: all state and units beside its largest batch."""
    cluster = costs.cluster
    persistent = range(len(cluster.model.unit_numels))

    def lacks(rank: int) -> bool:
        device = cluster.devices[rank]
        points = (*device.points[-1:], *device.recomputed_points[-1:])
        largest = min(request.max_micro_batch, max(point.batch for point in points))
        return not rank_memory(cluster, costs.stage, rank, persistent).fits(
            Caps(largest, largest), 1.0
        )

    return any(costs.by_rank(lacks))
