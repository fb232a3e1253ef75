"""Which linear layers a plan sends as factors: those that take less time than their reduction.

Fewer bytes make other batches and shares the best ones. So the plan is also searched on a cluster
whose network has become faster by as much as the factors save under even batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.factored_costs import can_exchange, exchanges_of
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile


def with_factored_layers(
    cluster: ClusterProfile,
    plan: Plan,
    decide: Callable[[StageCosts], Decision],
    preference: float,
) -> Plan:
    """The plan, or a faster one with factored layers.

    Args:
        cluster: what was measured.
        plan: without factored layers.
        decide: finds the plan for the costs of this stage.
        preference: the part of a step by which factors must make it faster.

    Memory is not counted again: rows take less than the gradients that they replace.
    """
    replicated = plan.stage == 0
    if not cluster.model.linear_layers or not can_exchange(cluster, replicated=replicated):
        return plan
    even = Plan.even(plan.world_size, plan.global_batch, plan.global_batch, plan.stage)
    seconds = {}
    candidates = [plan]
    if worthwhile(cluster, even):
        faster = StageCosts(_with_faster_network(cluster, even), plan.stage)
        candidates.append(decide(faster).plan)
    best = _seconds(cluster, plan)
    for candidate in candidates:
        factored = dataclasses.replace(
            candidate, factored=worthwhile(cluster, candidate), prediction=None
        )
        if factored.factored:
            seconds[factored] = _seconds(cluster, factored)
    if not seconds:
        return plan
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] * (1.0 + preference) < best else plan


def worthwhile(cluster: ClusterProfile, plan: Plan) -> tuple[str, ...]:
    """The layers whose factors take less time than their reduction under a plan."""
    every = dataclasses.replace(
        plan, factored=tuple(layer.name for layer in cluster.model.linear_layers), prediction=None
    )
    costs = costs_of(cluster, dataclasses.replace(plan, factored=()))
    communication = costs.communication(plan.shares)
    whole = communication.reduce + (0.0 if costs.shares_matter else communication.gather)
    return tuple(
        exchange.layer.name
        for exchange in exchanges_of(cluster, every)
        if costs.exchange_seconds(exchange, plan.shares)
        < whole * exchange.layer.numel / cluster.model.numel
    )


def _with_faster_network(cluster: ClusterProfile, plan: Plan) -> ClusterProfile:
    """The cluster on which a reduction takes as long as that of this plan with its factors."""
    before, costs = (
        costs_of(cluster, dataclasses.replace(plan, factored=names))
        for names in ((), worthwhile(cluster, plan))
    )
    plain, factored = before.communication(plan.shares), costs.communication(plan.shares)
    network = cluster.network
    reduced = factored.reduce / plain.reduce if plain.reduce else 1.0
    gathered = factored.gather / plain.gather if plain.gather else 1.0
    faster = dataclasses.replace(
        network,
        reduce_scatter_seconds=network.reduce_scatter_seconds * reduced,
        all_gather_seconds=network.all_gather_seconds * gathered,
    ).with_residuals(
        plan.stage, synchronization=costs.synchronization_residual, step=costs.step_residual
    )
    return dataclasses.replace(cluster, network=faster)


def _seconds(cluster: ClusterProfile, plan: Plan) -> float:
    return costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)
