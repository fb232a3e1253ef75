"""The best plan of each stage: of all ranks, or of some with others left out.

A policy decides for one stage (`POLICIES`). Plans of the exact search are rounded to simple ones
(`simple_plans`), and send layers as factors where that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from poplar.planner.active_ranks import ActiveSet, active_sets, without_ranks
from poplar.planner.baselines import BASELINES, Policy
from poplar.planner.branch_and_bound import TOLERANCE, Decision
from poplar.planner.cost_model import StageCosts, costs_of, hosting, step_seconds_of
from poplar.planner.factored_costs import exchanges_of
from poplar.planner.memory_shortfall import NoPlanFits, Request
from poplar.planner.persistent_units import fastest_plan_with_persistent_units
from poplar.planner.saved_memory import (
    fastest_plan_with_host_state,
    fastest_plan_with_recomputation,
    may_host,
    memory_may_bind,
)
from poplar.planner.simple_plans import simplified
from poplar.planner.suggested_changes import request_shortfall, suggested_changes
from poplar.planner.what_if import device_groups
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

POLICIES: Mapping[str, Policy] = {"exact": fastest_plan_with_persistent_units, **BASELINES}
"""How samples and shares are chosen at one stage. `exact` is the search for the fastest plan."""
MOST_PASSES = 10_000
"""Of a rank in a step; a plan lists each of them."""
_MOST_SETS = 24
"""Sets of active ranks that are searched, at most, beside that of all ranks."""


class TooManyPasses(ValueError):
    """A rank would need more than `MOST_PASSES`."""


class Found(NamedTuple):
    """The plan of a stage, without a prediction: of many, few are described."""

    seconds: float
    """Of its step, as predicted."""
    plan: Plan
    optimality_gap: float | None


class StageSearch:
    """The best plan of each stage so far.

    Args:
        request: what is searched for at each stage.
        stages: in which order.
        within: as for `alternatives`.
        may_factor: plans may have factored layers.
    """

    def __init__(
        self, request: Request, stages: Sequence[int], *, within: float, may_factor: bool
    ) -> None:
        self._request, self._stages = request, stages
        self._within, self._may_factor = within, may_factor
        self._best: dict[int, Found] = {}

    def plans(self) -> list[Found]:
        """The best plan of each stage at which one fits."""
        return list(self._best.values())

    def add(self, cluster: ClusterProfile, active: ActiveSet | None = None) -> None:
        """Search plans of all ranks of a cluster.

        Args:
            cluster: the active ranks.
            active: which they are; None: all.

        Raises:
            NoPlanFits: no plan fits at any of the stages.
            TooManyPasses: the global batch needs too many passes.
        """
        _check_passes(cluster, self._request)
        shortfalls = []
        for stage in self._stages:
            limit = self._limit(stage)
            if active and stage in self._best and active.bounds[stage] >= limit:
                continue
            costs = StageCosts(cluster, stage)
            missing = request_shortfall(costs, self._request)
            if missing is not None:
                shortfalls.append(missing)
                continue
            found = self._found(costs, self._request._replace(below=limit))
            if stage not in self._best or found.seconds < limit:
                left_out = active.left_out if active else ()
                self._best[stage] = found._replace(plan=found.plan.beside(left_out))
        if len(shortfalls) == len(self._stages):
            suggest = partial(suggested_changes, cluster, self._request, self._stages, shortfalls)
            raise NoPlanFits(shortfalls, suggest)

    def add_with_ranks_left_out(self, cluster: ClusterProfile) -> None:
        """Search plans of all ranks, and of sets of active ranks with which a step may be faster.

        Raises:
            NoPlanFits: no plan fits on all ranks, nor on the ranks of a set that was tried.
            TooManyPasses: as for `add`.
        """
        error: NoPlanFits | None = None
        try:
            self.add(cluster)
        except NoPlanFits as none_fits:
            error = none_fits
        sets = active_sets(
            cluster,
            [group.ranks for group in device_groups(cluster)],
            self._stages,
            global_batch=self._request.global_batch,
            max_micro_batch=self._request.max_micro_batch,
            may_factor=self._may_factor,
        )
        for active in islice(sets, _MOST_SETS):
            if active.bound * (1.0 + self._request.preference) >= self._fastest:
                break
            with suppress(NoPlanFits, TooManyPasses):
                self.add(without_ranks(cluster, active.left_out), active)
        if error is not None and not self._best:
            raise error

    @property
    def _fastest(self) -> float:
        """Seconds of the best plan of all stages."""
        return min((found.seconds for found in self._best.values()), default=math.inf)

    def _limit(self, stage: int) -> float:
        """A plan of this stage is of use if its step takes less than these seconds.

        The first plan of a stage is kept in any case. Others leave more ranks out, so they must be
        faster by more than the preference.
        """
        known = self._best.get(stage)
        faster = known.seconds / (1.0 + self._request.preference) if known else math.inf
        return min(self._within * self._fastest, faster)

    def _found(self, costs: StageCosts, request: Request) -> Found:
        """The plan of one stage, at which one fits."""
        cluster = costs.cluster
        plan, bound = _decide_with_host_state(request, costs)
        if self._may_factor and cluster.model.linear_layers:
            hosted, parts = hosting(cluster, plan.host_state), plan.host_state
            plan = _with_factored_layers(request, hosted, replace(plan, host_state=()))
            plan = replace(plan, host_state=parts)
            bound = None if plan.factored else bound
        plan = replace(plan, communication=cluster.communication.at(costs.stage))
        seconds = step_seconds_of(cluster, plan)
        return Found(seconds, plan, None if bound is None else _optimality_gap(seconds, bound))


def _decide(request: Request, costs: StageCosts) -> Decision:
    """The plan of one stage, and a lower bound on the seconds of all its plans."""
    decide = fastest_plan_with_recomputation if request.may_recompute else POLICIES[request.policy]
    plan, bound = decide(costs, request)
    if request.policy == "exact":
        plan = simplified(
            costs.cluster, plan, request.preference, max_micro_batch=request.max_micro_batch
        )
    return Decision(plan, bound)


def _decide_with_host_state(request: Request, costs: StageCosts) -> Decision:
    """As `_decide`, at a stage at which a plan fits; with host state if that is faster."""
    plain = request._replace(may_host=False)
    if not may_host(costs, request):
        return _decide(plain, costs)

    def decide(costs: StageCosts, below: float = math.inf) -> Decision | None:
        if request_shortfall(costs, plain) is not None:
            return None
        return _decide(plain._replace(below=min(below, plain.below)), costs)

    found = decide(costs)
    if found is None or memory_may_bind(costs, request):
        found = fastest_plan_with_host_state(costs, decide, found, request.preference)
    assert found is not None, "a stage without a memory shortfall has a plan"
    return found


def _with_factored_layers(request: Request, cluster: ClusterProfile, plan: Plan) -> Plan:
    """The plan, or one with factored layers that is faster by more than the preference.

    Fewer bytes make other batches and shares the best ones. So a plan is also searched on a cluster
    whose network has become faster by as much as the factors save under even batches. Memory is not
    counted again: rows take less than the gradients that they replace.

    Args:
        cluster: what was measured.
        plan: without factored layers.
    """
    candidates = [plan]
    even = Plan.even(plan.world_size, plan.global_batch, plan.global_batch, plan.stage)
    if names := worthwhile(cluster, even):
        faster = _with_faster_network(cluster, replace(even, factored=names))
        candidates.append(_decide(request, StageCosts(faster, plan.stage)).plan)
    best, limit = plan, step_seconds_of(cluster, plan) / (1.0 + request.preference)
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


def _optimality_gap(seconds: float, bound: float) -> float:
    """How much faster than this a step may be, as a fraction, if none is below the bound."""
    gap = 1.0 - bound / seconds if seconds else 0.0
    return gap if gap > TOLERANCE else 0.0


def _check_passes(cluster: ClusterProfile, request: Request) -> None:
    """Raise TooManyPasses if the global batch needs more passes than a plan may list."""
    largest = sum(
        min(
            request.max_micro_batch,
            max(point.batch for point in (*device.points, *device.recomputed_points)),
        )
        for device in cluster.devices
    )
    passes = -(-request.global_batch // largest)
    if passes > MOST_PASSES:
        raise TooManyPasses(
            f"a global batch of {request.global_batch} samples needs at least {passes} passes on a "
            f"rank, because the largest micro-batches of all ranks are {largest} samples together; "
            f"at most {MOST_PASSES} passes are planned: lower the global batch or profile larger "
            "micro-batches"
        )
