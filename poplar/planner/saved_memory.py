"""How ranks save memory at the cost of time: recomputed units, and optimizer state on the host.

A rank recomputes its first units: in the backward they are the last, when the activations of all
others are freed. State in host memory leaves device memory to other state and to larger batches,
but its update is slow.

Both are searched in one way: batches and shares for a few parts of the units or of the state, the
same on all ranks. Then each rank saves only as much as its memory needs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, costs_of, hosting, step_seconds_of
from poplar.planner.memory_model import SLACK_BYTES, Caps, rank_memory
from poplar.planner.memory_shortfall import Request, Shortfall, memory_shortfall
from poplar.planner.persistent_units import fastest_plan_with_persistent_units, unit_plans
from poplar.planner.recomputed_curves import (
    parts_of,
    recomputed_part,
    recomputing,
    saved_part,
    with_recomputed_parts,
)
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, DeviceProfile

_PARTS = (0.25, 0.5, 0.75, 1.0)
"""Of the units or of the state; parts that are tried."""
_STEPS = 1000
"""Parts of a plan's state are multiples of one over this."""
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
    plain: Decision | None = None
    if memory_shortfall(costs, request) is None:
        plain = fastest_plan_with_persistent_units(costs, request)
        measured = any(device.recomputed_points for device in costs.cluster.devices)
        may_recompute = measured and costs.cluster.model.recomputable_units
        if not may_recompute or not memory_may_bind(costs, request):
            return plain

    def decide(part: float, below: float) -> Decision | None:
        tried = _with_parts(costs, part, part or 1.0)
        if memory_shortfall(tried, request) is not None:
            return None
        return fastest_plan_with_persistent_units(tried, request._replace(below=below))

    shrink = partial(_with_fewest_units, costs)
    best = _best_of_parts(
        costs.cluster, plain, decide, shrink, preference=request.preference, below=request.below
    )
    assert best is not None, "a stage without a memory shortfall has a plan"
    return best


def _best_of_parts(
    cluster: ClusterProfile,
    plain: Decision | None,
    decide: Callable[[float, float], Decision | None],
    shrink: Callable[[Plan], Plan],
    *,
    preference: float,
    below: float = math.inf,
) -> Decision | None:
    """The fastest plan that saves memory where that makes a step faster; None: none fits.

    Args:
        cluster: what was measured.
        plain: the fastest plan that saves no memory; None: none fits. It is returned if its step is
            slower by at most `preference`.
        decide: the fastest plan if ranks save this part of what they can; None: none fits. Plans
            that take these seconds or more need not be told apart. Part 0 has the memory of saving
            all and the time of saving nothing, so no plan is faster.
        shrink: the plan that saves only what each rank needs.
        below: as for `Request`.
    """
    best, bound, limit = plain, 0.0, math.inf
    if plain is not None:
        limit = step_seconds_of(cluster, plain.plan) / (1.0 + preference)
    for part in (0.0, *_PARTS):
        found = decide(part, min(below, limit))
        if found is not None:
            if not part:
                bound = found.bound or 0.0
            plan = shrink(found.plan)
            seconds = step_seconds_of(cluster, plan)
            if seconds < limit:
                best, limit = Decision(plan), seconds
        elif not part:
            return plain
        if bound >= min(below, limit) * (1.0 - _SETTLED):
            break
    return best and best._replace(bound=min(bound, step_seconds_of(cluster, best.plan)))


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
            device = recomputing(cluster.devices[rank], *parts_of(model, units[:number]))
            return replace(memories[rank], device=device).fits(caps, plan.shares[rank])

        number = 0 if fits(0) else 1 + bisect_left(range(1, len(units) + 1), True, key=fits)
        return frozenset(units[:number])

    return costs.with_recomputed(cluster, list(map(fewest, range(cluster.world_size))))


def _with_fewest_units(costs: StageCosts, plan: Plan) -> Plan:
    """A plan that fits if ranks recompute all units, with the fewest of them."""
    cluster = costs.cluster
    names, units = cluster.model.unit_names, frozenset(cluster.model.recomputable_units)
    every = [units if device.recomputed_points else frozenset[int]() for device in cluster.devices]
    persistent = frozenset(names.index(unit.name) for unit in plan.units if unit.persistent)
    full = replace(costs, persistent=persistent).with_recomputed(cluster, every)
    fewest = with_fewest_recomputed_units(cluster, full, plan)
    return replace(plan, units=unit_plans(fewest))


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


Decide = Callable[[StageCosts, float], Decision | None]
"""The fastest plan on these costs. Plans that take these seconds or more need not be told apart.
None: no plan fits."""


def can_host(device: DeviceProfile) -> bool:
    """Whether a rank may keep state in host memory."""
    return device.host_optimizer_seconds is not None and device.host_memory_bytes > 0


def may_host(costs: StageCosts, request: Request) -> bool:
    """Whether ranks may keep state in host memory, where no parameters are encoded."""
    sent = costs.cluster.communication.at(costs.stage).parameters
    return request.may_host and sent == "exact" and any(map(can_host, costs.cluster.devices))


def with_all_on_host(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster if every rank keeps its state in host memory, as far as it can."""
    return hosting(cluster, [float(can_host(device)) for device in cluster.devices])


def fastest_plan_with_host_state(
    costs: StageCosts, decide: Decide, plain: Decision | None, preference: float
) -> Decision | None:
    """The fastest plan of one stage, with state in host memory where that makes it faster.

    Args:
        costs: without state in host memory.
        plain: the fastest plan without state in host memory; None: none fits. It is returned if its
            step is slower by at most `preference`.
    """
    cluster = costs.cluster
    lacking: set[int] = set()
    """Ranks that lack memory in a plan that was found."""

    def decide_with(part: float, below: float) -> Decision | None:
        if not part:
            hosted = _at_no_cost(with_all_on_host(cluster))
        elif lacking:
            parts = [part * (rank in lacking) for rank in range(cluster.world_size)]
            hosted = hosting(cluster, parts)
        else:
            return None
        return decide(replace(costs, cluster=hosted), below)

    def shrink(plan: Plan) -> Plan:
        plan = _with_least_on_host(cluster, plan)
        lacking.update(rank for rank, part in enumerate(plan.host_state) if part)
        return plan

    return _best_of_parts(cluster, plain, decide_with, shrink, preference=preference)


def _with_least_on_host(cluster: ClusterProfile, plan: Plan) -> Plan:
    """The plan with as little state in host memory as the memory of each rank needs."""
    costs, model = costs_of(cluster, plan), cluster.model
    needed = costs.needed_bytes(plan.micro_batches, plan.shares)
    owned = costs.owned(plan.shares) if costs.shares_matter else (1.0,) * plan.world_size
    parts = []
    for memory, own, share in zip(costs.memories, needed, owned, strict=True):
        missing = own - memory.limit
        state = model.optimizer_bytes * model.numel * share
        part = missing / state if missing > SLACK_BYTES else 0.0
        parts.append(min(1.0, math.ceil(_STEPS * part) / _STEPS))
    return replace(plan, host_state=tuple(parts))


def _at_no_cost(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster with updates on the host that are as fast as on the devices."""

    def free(device: DeviceProfile) -> DeviceProfile:
        if not device.state_on_host:
            return device
        seconds = max(0.0, device.optimizer_seconds - device.optimizer_latency_seconds)
        on_host = min(seconds, device.host_optimizer_seconds or 0.0)
        return replace(device, host_optimizer_seconds=on_host)

    return cluster.with_devices(free)
