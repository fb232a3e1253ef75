"""The fastest plan for a measured cluster and a global batch, over ZeRO stages.

A function of values: every rank that holds the same profile finds the same plan. A policy decides
for each stage (`POLICIES`); here the stages are compared, and plans of the exact search
are rounded to simple ones (`simple_plans`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from poplar.planner.active_ranks import active_sets, without_ranks
from poplar.planner.baselines import BASELINES, Policy
from poplar.planner.branch_and_bound import TOLERANCE, Decision
from poplar.planner.cost_model import StageCosts, hosting, step_seconds_of
from poplar.planner.encoded_costs import may_gain
from poplar.planner.factored_choice import with_factored_layers
from poplar.planner.host_state import can_host, fastest_plan_with_host_state
from poplar.planner.memory_shortfall import NoPlanFits, Request, Shortfall
from poplar.planner.persistent_units import fastest_plan_with_persistent_units
from poplar.planner.prediction import describe, predicted_seconds
from poplar.planner.recomputed_units import fastest_plan_with_recomputation, memory_may_bind
from poplar.planner.simple_plans import PREFERENCE, simplified
from poplar.planner.suggested_changes import request_shortfall, suggested_changes
from poplar.planner.what_if import device_groups
from poplar.values.communication import BITS, Communication, Precision
from poplar.values.errors import check_class
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile

__all__ = ["ALL_STAGES", "POLICIES", "NoPlanFits", "alternatives", "search"]

ALL_STAGES = tuple(range(len(STRATEGIES)))
POLICIES: Mapping[str, Policy] = {"exact": fastest_plan_with_persistent_units, **BASELINES}
"""How samples and shares are chosen at one stage. `exact` is the search for the fastest plan."""


WITHIN = 1.25
"""Times of the best plan's step within which plans of other stages are searched for."""
MOST_PASSES = 10_000
"""Of a rank in a step; a plan lists each of them."""
Sends = Precision | Literal["auto"] | Communication
"""What `search` takes for the precision in which ranks send."""
Choice = Literal["auto", "never"]
"""Whether a plan may use one of the techniques that `search` chooses among."""
CHOICES: Mapping[str, Collection[str]] = {
    "policy": POLICIES,
    **dict.fromkeys(("recompute", "factored", "host_state", "leave_out"), get_args(Choice)),
    "communication": (*BITS, "auto"),
}
"""The arguments of `search` that are one of several words, with these."""
_SENDS_MOST = 2
"""A stage at which one precision stands for all that can be sent."""
WORTH_NOISE = 0.07
"""Part by which fewer bits per element must make a step faster: 2 % beyond the error of a
predicted step on a quiet machine (5 %). Noise in the gradient is no free gain."""
_MOST_SETS = 24
"""Sets of active ranks that are searched, at most, beside that of all ranks."""


def search(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] = ALL_STAGES,
    policy: str = "exact",
    max_micro_batch: int | None = None,
    preference: float = PREFERENCE,
    recompute: Choice = "auto",
    factored: Choice = "auto",
    host_state: Choice = "auto",
    leave_out: Choice = "auto",
    communication: Sends = "exact",
) -> Plan:
    """The fastest plan that fits in memory, with its prediction.

    Args:
        cluster: the measured profile.
        global_batch: samples of one optimizer step over all ranks.
        stages: ZeRO stages to choose from.
        policy: one of `POLICIES`.
        max_micro_batch: largest micro-batch on any rank; None: the largest that was measured.
        preference: with policy "exact", a plan with even shares, fewer passes, fewer persistent
            units or no recomputation is chosen if its step is slower by at most this fraction of
            the fastest one.
        recompute: "auto": with policy "exact", ranks may recompute units in the backward
            (activation checkpointing), if that was measured; "never": they do not.
        factored: "auto": with policy "exact", weight gradients of linear layers are sent as factors
            where that makes the step faster (`Plan.factored`); "never": they are not.
        host_state: "auto": with policy "exact", ranks keep optimizer state in host memory if no
            plan fits otherwise, or if that makes the step faster, and if it was measured
            (`Plan.host_state`); "never": they do not.
        leave_out: "auto": with policy "exact", ranks are left out if that makes the step faster by
            more than `preference`, or if no plan fits otherwise (`Plan.left_out`); "never": all
            ranks take part, as integrations with other trainers need it.
        communication: the precision in which the ranks send (`Plan.communication`), as far as each
            stage can. With less than "exact" the gradient is not exact. "auto": 8 bits, and again
            4 bits, if that makes the step clearly faster (`WORTH_NOISE`) and the seconds of
            encoding were measured; never where the ranks share memory.

    Returns:
        The same plan for the same arguments. Of equally fast plans, the one that needs less memory,
        then the one of the lower stage.

    Raises:
        NoPlanFits: no plan fits at any of the stages. The message names the rank that lacks the
            most memory at the stage that comes closest, and the smallest changes that would help.
        ValueError: an argument is out of range, or the profile lacks what the policy needs.
    """
    return alternatives(
        cluster,
        global_batch=global_batch,
        stages=stages,
        policy=policy,
        max_micro_batch=max_micro_batch,
        preference=preference,
        recompute=recompute,
        factored=factored,
        host_state=host_state,
        leave_out=leave_out,
        communication=communication,
    )[0]


def alternatives(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] = ALL_STAGES,
    policy: str = "exact",
    max_micro_batch: int | None = None,
    preference: float = PREFERENCE,
    recompute: Choice = "auto",
    factored: Choice = "auto",
    host_state: Choice = "auto",
    leave_out: Choice = "auto",
    communication: Sends = "exact",
    within: float = WITHIN,
) -> tuple[Plan, ...]:
    """A plan of every stage at which one fits, in the order in which `search` prefers them.

    Takes the arguments of `search`, and raises the same errors.

    Args:
        within: a stage is not searched further once all of its plans are known to take this many
            times as long as the best one of a lower stage. Then its plan need not be its best one,
            and `optimality_gap` says what the search left open.
    """
    check_class("cluster", cluster, ClusterProfile)
    _check_at_least_one("global_batch", global_batch)
    if max_micro_batch is not None:
        _check_at_least_one("max_micro_batch", max_micro_batch)
    given = (policy, recompute, factored, host_state, leave_out, communication)
    for (name, known), chosen in zip(CHOICES.items(), given, strict=True):
        check_choice(name, chosen, f"{name} must be one of {', '.join(known)}, got {chosen!r}")
    if not (math.isfinite(preference) and preference >= 0.0):
        raise ValueError(f"preference must be finite and at least 0, got {preference}")
    request = Request(
        global_batch,
        min(max_micro_batch or global_batch, global_batch),
        policy,
        preference,
        may_recompute=policy == "exact" and recompute == "auto",
        may_host=policy == "exact" and host_state == "auto",
    )
    wanted = _checked_stages(stages)
    may_factor = policy == "exact" and factored == "auto"

    def by_stage(cluster: ClusterProfile, fastest: float = math.inf) -> list[Plan]:
        return _by_stage(cluster, request, wanted, fastest, within=within, may_factor=may_factor)

    def sending(given: Precision | Communication) -> tuple[Plan, ...]:
        sent = replace(cluster, communication=Communication.of(given, _SENDS_MOST))
        if policy == "exact" and leave_out == "auto" and cluster.world_size > 1:
            found = _on_fastest_ranks(sent, request, by_stage, may_factor=may_factor)
        else:
            found = by_stage(sent)
        return tuple(sorted(found, key=partial(_sort_key, preference)))

    if communication != "auto":
        return sending(communication)
    best = sending("exact")
    fewer_bits: tuple[Precision, ...] = ("int8", "int4") if may_gain(cluster) else ()
    for precision in fewer_bits:
        with suppress(NoPlanFits):
            found = sending(precision)
            if (1.0 + WORTH_NOISE) * predicted_seconds(found[0]) < predicted_seconds(best[0]):
                best = found
    return best


def check_choice(name: str, given: object, complaint: str) -> None:
    """Raise ValueError with this complaint unless `given` is one of `CHOICES[name]`."""
    is_whole = name == "communication" and isinstance(given, Communication)
    if not (is_whole or given in CHOICES[name]):
        raise ValueError(complaint)


def _by_stage(
    cluster: ClusterProfile,
    request: Request,
    stages: Sequence[int],
    fastest: float,
    *,
    within: float,
    may_factor: bool,
) -> list[Plan]:
    """A plan of every stage at which one fits, on all ranks of the cluster.

    Args:
        fastest: seconds of the best known plan.
        within: as for `alternatives`.
        may_factor: plans may have factored layers.

    Raises:
        NoPlanFits: no plan fits at any of the stages.
        ValueError: the global batch needs too many passes.
    """
    _check_passes(cluster, request)
    found: list[Plan] = []
    shortfalls: list[Shortfall] = []
    for stage in stages:
        costs = StageCosts(cluster, stage)
        sends_all = cluster.communication.at(stage).parameters == "exact"
        wanted = request._replace(may_host=request.may_host and sends_all)
        missing = request_shortfall(costs, wanted)
        if missing is not None:
            shortfalls.append(missing)
            continue
        asked = wanted._replace(below=within * fastest)
        plan, bound = _decide_with_host_state(asked, costs)
        if may_factor:
            hosted, parts = hosting(cluster, plan.host_state), plan.host_state
            plan = replace(plan, host_state=())
            decide = partial(_decide, asked)
            plan = with_factored_layers(hosted, plan, decide, request.preference)
            plan = replace(plan, host_state=parts)
            bound = None if plan.factored else bound
        plan = replace(plan, communication=cluster.communication.at(stage))
        seconds = step_seconds_of(cluster, plan)
        fastest = min(fastest, seconds)
        gap = None if bound is None else _optimality_gap(seconds, bound)
        found.append(describe(cluster, plan, request.policy, gap))
    if not found:
        suggest = partial(suggested_changes, cluster, request, stages, shortfalls)
        raise NoPlanFits(shortfalls, suggest)
    return found


def _on_fastest_ranks(
    cluster: ClusterProfile,
    request: Request,
    by_stage: Callable[..., list[Plan]],
    *,
    may_factor: bool,
) -> list[Plan]:
    """The best plan of each stage over sets of active ranks.

    Args:
        by_stage: the plans of a cluster, given the seconds of the best known one.
        may_factor: plans may have factored layers.

    Raises:
        NoPlanFits: no plan fits on all ranks, nor on the ranks of a set that was tried.
    """
    best: dict[int, Plan] = {}
    error: NoPlanFits | None = None
    try:
        best = {plan.stage: plan for plan in by_stage(cluster)}
    except NoPlanFits as none_fits:
        error = none_fits
    groups = [group.ranks for group in device_groups(cluster)]
    sets = active_sets(
        cluster,
        groups,
        global_batch=request.global_batch,
        max_micro_batch=request.max_micro_batch,
        may_factor=may_factor,
    )
    for bound, left_out in sets[:_MOST_SETS]:
        fastest = min(map(predicted_seconds, best.values()), default=math.inf)
        if (1.0 + request.preference) * bound >= fastest:
            break
        with suppress(ValueError):  # no plan fits, or it would need too many passes
            for plan in by_stage(without_ranks(cluster, left_out), fastest):
                known = best.get(plan.stage)
                faster = (1.0 + request.preference) * predicted_seconds(plan)
                if known is None or faster < predicted_seconds(known):
                    gap = (plan.prediction or {})["optimality_gap"]
                    best[plan.stage] = describe(cluster, plan.beside(left_out), request.policy, gap)
    if not best:
        assert error is not None
        raise error
    return list(best.values())


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
    if not request.may_host or not any(map(can_host, costs.cluster.devices)):
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


def plan_or_error(cluster: ClusterProfile, **request: Any) -> Plan | ValueError:
    """What `search` returns for these arguments, or the error that says why there is no plan."""
    try:
        return search(cluster, **request)
    except ValueError as error:
        return error


def _optimality_gap(seconds: float, bound: float) -> float:
    """How much faster than this a step may be, as a fraction, if none is below the bound."""
    gap = 1.0 - bound / seconds if seconds else 0.0
    return gap if gap > TOLERANCE else 0.0


def _sort_key(preference: float, plan: Plan) -> tuple[float, int, int]:
    """Seconds, multiplied for plans with recomputation or host state, which must be faster."""
    assert plan.prediction is not None
    seconds, memory = plan.prediction["step_seconds"], plan.prediction["memory_bytes"]
    if plan.host_state or any(unit.recomputed_on for unit in plan.units):
        seconds *= 1.0 + preference
    return seconds, sum(memory), plan.stage


def _checked_stages(stages: Sequence[int]) -> list[int]:
    is_some = isinstance(stages, Collection) and not isinstance(stages, str) and len(stages) > 0
    if not is_some or any(isinstance(s, bool) or s not in ALL_STAGES for s in stages):
        raise ValueError(f"stages must be a non-empty subset of {ALL_STAGES}, got {stages!r}")
    return sorted({int(stage) for stage in stages})


def _check_passes(cluster: ClusterProfile, request: Request) -> None:
    """Refuse a global batch that needs more passes than a plan may list."""
    largest = sum(
        min(
            request.max_micro_batch,
            max(point.batch for point in (*device.points, *device.recomputed_points)),
        )
        for device in cluster.devices
    )
    passes = -(-request.global_batch // largest)
    if passes > MOST_PASSES:
        raise ValueError(
            f"a global batch of {request.global_batch} samples needs at least {passes} passes on a "
            f"rank, because the largest micro-batches of all ranks are {largest} samples together; "
            f"at most {MOST_PASSES} passes are planned: lower the global batch or profile larger "
            "micro-batches"
        )


def _check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
