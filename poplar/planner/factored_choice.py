"""Which linear layers a plan sends as factors: those that take less time than their reduction.

Fewer bytes make other batches and shares the best ones. So the plan is also searched on a cluster
whose network has become faster by as much as the factors save under even batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, costs_of, step_seconds_of
from poplar.planner.factored_costs import exchanges_of
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
    candidates = [plan]
    even = Plan.even(plan.world_size, plan.global_batch, plan.global_batch, plan.stage)
    if names := worthwhile(cluster, even):
        faster = _with_faster_network(cluster, replace(even, factored=names))
        candidates.append(decide(StageCosts(faster, plan.stage)).plan)
    best, limit = plan, step_seconds_of(cluster, plan) / (1.0 + preference)
    for candidate in candidates:
        names = worthwhile(cluster, candidate)
        factored = replace(candidate, factored=names, prediction=None)
        if names and (seconds := step_seconds_of(cluster, factored)) < limit:
            best, limit = factored, seconds
    return best


def worthwhile(cluster: ClusterProfile, plan: Plan) -> tuple[str, ...]:
    """The layers whose factors take less time than their reduction under a plan.

    None are known to, without the rates of links. Where every rank updates all parameters, all must
    multiply with the same bits, so their devices, kernels, precisions and threads must be equal.
    """
    names = tuple(layer.name for layer in cluster.model.linear_layers)
    if not names or cluster.world_size == 1:
        return ()
    costs = costs_of(cluster, replace(plan, factored=()))
    kinds = {(device.name, device.multiplication) for device in cluster.devices}
    if len(kinds) > 1 and not costs.shares_matter:
        return ()
    if costs.exact_collectives.reduce_scatter.link_seconds is None:
        return ()
    communication = costs.communication(plan.shares)
    whole = communication.reduce + (0.0 if costs.shares_matter else communication.gather)
    return tuple(
        exchange.layer.name
        for exchange in exchanges_of(cluster, replace(plan, factored=names, prediction=None))
        if costs.exchange_seconds(exchange, plan.shares)
        < whole * exchange.layer.numel / cluster.model.numel
    )


def _with_faster_network(cluster: ClusterProfile, plan: Plan) -> ClusterProfile:
    """The cluster on which a reduction takes as long as that of this plan with its factors."""
    costs, network = costs_of(cluster, plan), cluster.network
    plain = costs_of(cluster, replace(plan, factored=())).communication(plan.shares)
    factored = costs.communication(plan.shares)
    reduced = factored.reduce / plain.reduce if plain.reduce else 1.0
    gathered = factored.gather / plain.gather if plain.gather else 1.0
    faster = replace(
        network,
        reduce_scatter_seconds=network.reduce_scatter_seconds * reduced,
        all_gather_seconds=network.all_gather_seconds * gathered,
    ).with_residuals(
        plan.stage, synchronization=costs.synchronization_residual, step=costs.step_residual
    )
    return replace(cluster, network=faster)
