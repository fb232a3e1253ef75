"""Single owners of small units, where latency costs more than bandwidth.

A collective of which one rank owns everything has less latency than one with parts on all ranks,
and a busier link. Every rank keeps its part of the whole state: the shares of the other units make
up for the units that it owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.simulator.step_simulation import simulate
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import ClusterProfile

WORTHWHILE = 0.02
"""Part of a simulated step that single owners must save."""
_MERGED = ".."
"""In the name of a unit of several blocks. The engine merges no blocks if units have own shares."""


def with_unit_owners(cluster: ClusterProfile, plan: Plan) -> Plan:
    """The plan in which single ranks own small units, if its simulated step is `WORTHWHILE` faster.

    Unchanged if latencies were not measured, nothing is sharded, units are merged blocks, or
    layers are factored, whose seconds do not follow from their elements.
    """
    names = cluster.model.unit_names
    is_possible = cluster.network.collective_latency_seconds and plan.stage > 0 and names
    if not is_possible or plan.factored or any(_MERGED in name for name in names):
        return plan
    owners = _owners(costs_of(cluster, plan), plan)
    if not owners:
        return plan
    changed = _with_owners(cluster, plan, owners)
    try:
        seconds = simulate(cluster, changed).step_seconds
    except DoesNotFit:
        return plan
    limit = (1.0 - WORTHWHILE) * simulate(cluster, plan).step_seconds
    return changed if seconds <= limit else plan


def _owners(costs: StageCosts, plan: Plan) -> dict[int, int]:
    """The owners of the units that are faster with one, as far as they leave ranks their parts of
    the state. Large units first, each to the rank that owns least of its part so far.
    """
    model, collectives = costs.cluster.model, costs.collectives
    every_pass = costs.synchronizes_every_pass
    synchronizations = max(map(len, plan.micro_batches)) if every_pass else 1
    gathers = costs.schedule.gathers * synchronizations + costs.gathers_after_step

    def seconds(unit: int, shares: tuple[float, ...]) -> float:
        part = model.unit_numels[unit] / model.numel
        reducing = collectives.reduce_scatter.unit_seconds(part, shares)
        return synchronizations * reducing + gathers * collectives.all_gather.unit_seconds(
            part, shares
        )

    left = [share * model.numel for share in plan.shares]
    owners: dict[int, int] = {}
    for unit in sorted(range(len(model.unit_numels)), key=lambda u: -model.unit_numels[u]):
        numel, owner = model.unit_numels[unit], left.index(max(left))
        if left[owner] >= numel and seconds(unit, _only(owner, plan)) < seconds(unit, plan.shares):
            owners[unit] = owner
            left[owner] -= numel
    return owners


def _with_owners(cluster: ClusterProfile, plan: Plan, owners: Mapping[int, int]) -> Plan:
    """The plan with these owners by unit, and the same parts of the whole state."""
    model = cluster.model
    owned = [0] * plan.world_size
    for unit, owner in owners.items():
        owned[owner] += model.unit_numels[unit]
    others, shares = model.numel - sum(owned), plan.shares
    if others:
        left = [
            max(0.0, share * model.numel - own) / others
            for share, own in zip(plan.shares, owned, strict=True)
        ]
        shares = tuple(part / sum(left) for part in left)
    units = {unit.name: unit for unit in plan.units}
    for unit, owner in sorted(owners.items()):
        name = model.unit_names[unit]
        own = units.get(name, UnitPlan(name))
        units[name] = dataclasses.replace(own, shares=_only(owner, plan))
    return dataclasses.replace(plan, shares=shares, units=tuple(units.values()), prediction=None)


def _only(owner: int, plan: Plan) -> tuple[float, ...]:
    return tuple(float(rank == owner) for rank in range(plan.world_size))
