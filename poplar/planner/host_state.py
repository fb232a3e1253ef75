"""How much optimizer state each rank keeps in host memory, where that makes a step faster.

State in host memory leaves device memory to other state and to larger batches, but its update is
slow. Batches, shares and recomputed units are searched for a few parts of the state, the same on
all ranks that may lack memory. Then each rank keeps only as much on the host as its memory needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, costs_of, hosting, step_seconds_of
from poplar.planner.memory_model import SLACK_BYTES
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, DeviceProfile

_PARTS = (0.25, 0.5, 0.75, 1.0)
"""Of the state; parts that are tried."""
_STEPS = 1000
"""Parts of a plan are multiples of one over this."""
_SETTLED = 1e-3
"""A plan that is proven to be this close to the fastest is good enough."""

Decide = Callable[[StageCosts, float], Decision | None]
"""The fastest plan on these costs. Plans that take these seconds or more need not be told apart.
None: no plan fits."""


def can_host(device: DeviceProfile) -> bool:
    """Whether a rank may keep state in host memory."""
    return device.host_optimizer_seconds is not None and device.host_memory_bytes > 0


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
    cluster, limit = costs.cluster, math.inf
    if plain is not None:
        limit = step_seconds_of(cluster, plain.plan) / (1.0 + preference)
    # No plan is faster than with the memory of all state on the host and the time of none.
    free = decide(replace(costs, cluster=_at_no_cost(with_all_on_host(cluster))), limit)
    if free is None:
        return plain
    best, bound = plain, min(one.bound or 0.0 for one in (free, plain) if one is not None)
    lacking = [False] * cluster.world_size
    for part in (0.0, *_PARTS):
        found: Decision | None = free
        if part:
            parts = [part * one for one in lacking]
            found = decide(replace(costs, cluster=hosting(cluster, parts)), limit)
        if found is not None:
            plan = _with_least_on_host(cluster, found.plan)
            lacking = [one or plan.part_on_host(rank) > 0.0 for rank, one in enumerate(lacking)]
            seconds = step_seconds_of(cluster, plan)
            if seconds < limit:
                best, limit = Decision(plan), seconds
        if bound >= limit * (1.0 - _SETTLED) or not any(lacking):
            break
    return best and best._replace(bound=min(bound, step_seconds_of(cluster, best.plan)))


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
