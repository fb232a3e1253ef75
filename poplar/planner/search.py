"""Exact batch allocation: a measured cluster and a global batch in, the fastest plan out.

Values to values: no process groups, no tensors, no clock, so every rank that holds the same profile
finds the same plan. `exact` searches one stage, `policies` decide as others do; here stages are
compared, and what does not fit is said. `tests/unit/test_search.py` compares it with exhaustive
search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from poplar.plan import STRATEGIES, Plan
from poplar.planner.baselines import POLICIES, shortfall_rule
from poplar.planner.branch_and_bound import TOLERANCE, Decision
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.heuristic import Request
from poplar.planner.memory_shortfall import NoPlanFits, Shortfall
from poplar.planner.prediction import describe, predict_at
from poplar.planner.simple_plans import PREFERENCE, simplified
from poplar.profile import ClusterProfile

__all__ = ["ALL_STAGES", "NoPlanFits", "alternatives", "search"]

ALL_STAGES = tuple(range(len(STRATEGIES)))


def search(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] = ALL_STAGES,
    policy: str = "exact",
    max_micro_batch: int | None = None,
    preference: float = PREFERENCE,
) -> Plan:
    """The fastest plan that fits, its prediction inside.

    Args:
        cluster: what was measured.
        global_batch: samples of one optimizer step over all ranks.
        stages: ZeRO stages to choose from.
        policy: one of `POLICIES`.
        max_micro_batch: most samples of one pass, on any rank; None: what was measured.
        preference: policy "exact" prefers even shares and fewer passes where they cost no more
            than this fraction of the fastest step.

    Returns:
        The same plan for the same arguments. Of plans that are equally fast, the one that needs
        less memory, then the one of the lower stage, which communicates less.

    Raises:
        NoPlanFits: at none of the stages does a plan fit; says for the stage that comes closest
            which rank misses how many bytes, and the smallest changes with which a plan would fit.
        ValueError: arguments that no plan has; a policy that lacks what it goes by.
    """
    return alternatives(
        cluster,
        global_batch=global_batch,
        stages=stages,
        policy=policy,
        max_micro_batch=max_micro_batch,
        preference=preference,
    )[0]


def alternatives(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] = ALL_STAGES,
    policy: str = "exact",
    max_micro_batch: int | None = None,
    preference: float = PREFERENCE,
) -> tuple[Plan, ...]:
    """The best plan of each stage that fits, fastest predicted first; `search` takes the first.

    Arguments and errors are those of `search`.
    """
    found, shortfalls = plans_by_stage(
        cluster,
        global_batch=global_batch,
        stages=stages,
        policy=policy,
        max_micro_batch=max_micro_batch,
        preference=preference,
    )
    if not found:
        rule = shortfall_rule(policy, global_batch)
        raise NoPlanFits(tuple(shortfalls.values()), cluster, rule)
    return found


def plans_by_stage(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] = ALL_STAGES,
    policy: str = "exact",
    max_micro_batch: int | None = None,
    preference: float = PREFERENCE,
) -> tuple[tuple[Plan, ...], dict[int, Shortfall]]:
    """The best plan of each stage that fits, fastest first, and by stage why the others do not.

    Arguments are those of `search`, and so are errors about them.
    """
    _check_at_least_one("global_batch", global_batch)
    if max_micro_batch is not None:
        _check_at_least_one("max_micro_batch", max_micro_batch)
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
    most = global_batch if max_micro_batch is None else min(max_micro_batch, global_batch)
    if not (math.isfinite(preference) and preference >= 0.0):
        raise ValueError(f"preference must be finite and 0 or more, got {preference}")
    request = Request(global_batch, most)
    found: list[Plan] = []
    shortfalls: dict[int, Shortfall] = {}
    for stage in _checked_stages(stages):
        costs = StageCosts(cluster, stage)
        try:
            decision = POLICIES[policy](costs, request)
        except NoPlanFits as error:
            shortfalls[stage] = error.closest
            continue
        if policy == "exact":
            decision = _simplified(cluster, decision, request, preference)
        found.append(_described(cluster, decision, policy))
    return tuple(sorted(found, key=_preference)), shortfalls


def _simplified(
    cluster: ClusterProfile, fastest: Decision, request: Request, preference: float
) -> Decision:
    """A simpler plan that is nearly as fast; its gap is to the fastest that is possible."""
    plan = simplified(cluster, fastest.plan, preference, max_micro_batch=request.max_micro_batch)
    bound = _step_seconds(cluster, fastest.plan) * (1.0 - (fastest.gap or 0.0))
    seconds = _step_seconds(cluster, plan)
    gap = 1.0 - bound / seconds if seconds else 0.0
    return Decision(plan, gap if gap > TOLERANCE else 0.0)


def _described(cluster: ClusterProfile, decision: Decision, policy: str) -> Plan:
    prediction = predict_at(costs_of(cluster, decision.plan), decision.plan)
    prediction = dataclasses.replace(prediction, optimality_gap=decision.gap)
    return describe(cluster, decision.plan, prediction, policy)


def _step_seconds(cluster: ClusterProfile, plan: Plan) -> float:
    return costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)


def _preference(plan: Plan) -> tuple[float, int, int]:
    assert plan.prediction is not None
    seconds, memory = plan.prediction["step_seconds"], plan.prediction["memory_bytes"]
    return seconds, sum(memory), plan.stage


def _checked_stages(stages: Sequence[int]) -> list[int]:
    is_some = isinstance(stages, Collection) and not isinstance(stages, str) and len(stages) > 0
    if not is_some or any(isinstance(s, bool) or s not in ALL_STAGES for s in stages):
        raise ValueError(f"stages must be some of {ALL_STAGES}, got {stages!r}")
    return sorted({int(stage) for stage in stages})


def _check_at_least_one(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number, at least 1, got {value!r}")
