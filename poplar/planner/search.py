"""The fastest plan for a measured cluster and a global batch, over ZeRO stages.

A function of values: every rank that holds the same profile finds the same plan. `stage_search`
finds the plans of the stages; here they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from poplar.planner.collective_costs import may_gain
from poplar.planner.memory_shortfall import NoPlanFits, Request
from poplar.planner.prediction import describe, predicted_seconds
from poplar.planner.simple_plans import PREFERENCE
from poplar.planner.stage_search import POLICIES, StageSearch
from poplar.values.communication import BITS, Communication, Precision
from poplar.values.errors import check_class
from poplar.values.plan import ALL_STAGES, Plan, checked_stages
from poplar.values.profile import ClusterProfile
from poplar.values.schema import positive_count

__all__ = ["POLICIES", "NoPlanFits", "alternatives", "search"]

WITHIN = 1.25
"""Times of the best plan's step within which plans of other stages are searched for."""
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
_ROUNDING = 1e-9
WORTH_NOISE = 0.07
"""Part by which fewer bits per element must make a step faster: 2 % beyond the error of a
predicted step on a quiet machine (5 %). Noise in the gradient is no free gain."""


def search(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] | None = None,
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
        stages: ZeRO stages to choose from; None: those of which steps ran while the profile was
            measured (`ClusterProfile.observed_stages`), all if none ran. Never those at which steps
            failed (`ClusterProfile.failed_stages`).
        policy: `"exact"`, `"even_shares"` for engines without uneven shares (DDP, FSDP2), or a
            published policy to compare with: `"even"`, `"flops"`, `"paper"`.
        max_micro_batch: largest micro-batch on any rank; None: the largest that was measured.
        preference: with policy "exact", a plan with even shares, fewer passes, fewer persistent
            units or no recomputation is chosen if its step is slower by at most this fraction of
            the fastest one.
        recompute: "auto": with policy "exact", ranks may recompute units in the backward
            (activation checkpointing), if that was measured; "never": they do not.
        factored: "auto": with policy "exact", weight gradients of linear layers are sent as factors
            where that makes the step faster (`Plan.factored`); "never": they are not. Use "never"
            for a model that reads such a weight outside of its layer.
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
        within=(1.0 + preference) * (1.0 + _ROUNDING),  # slower ones are not the first
    )[0]


def alternatives(
    cluster: ClusterProfile,
    *,
    global_batch: int,
    stages: Sequence[int] | None = None,
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
    global_batch = _at_least_one("global_batch", global_batch)
    if max_micro_batch is not None:
        max_micro_batch = _at_least_one("max_micro_batch", max_micro_batch)
    given = (policy, recompute, factored, host_state, leave_out, communication)
    check_choices(dict(zip(CHOICES, given, strict=True)))
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
    observed = cluster.observed_stages or ALL_STAGES
    given_stages = checked_stages(observed if stages is None else stages)
    wanted = [stage for stage in given_stages if stage not in cluster.failed_stages]
    if not wanted:
        raise ValueError(
            f"steps of stage {' and '.join(map(str, given_stages))} failed while the profile was "
            f"measured; search at other stages. Notes of the profile: {'; '.join(cluster.notes)}"
        )
    may_factor = policy == "exact" and factored == "auto"

    def sending(given: Precision | Communication) -> tuple[Plan, ...]:
        sent = replace(cluster, communication=Communication.of(given, _SENDS_MOST))
        searched = StageSearch(request, wanted, within=within, may_factor=may_factor)
        if policy == "exact" and leave_out == "auto" and cluster.world_size > 1:
            searched.add_with_ranks_left_out(sent)
        else:
            searched.add(sent)
        found = (describe(sent, one.plan, policy, one.optimality_gap) for one in searched.plans())
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


def check_choices(given: Mapping[str, object]) -> None:
    """Raise ValueError unless these arguments of `search`, by name, are among their `CHOICES`."""
    for name, chosen in given.items():
        is_whole = name == "communication" and isinstance(chosen, Communication)
        if not (is_whole or chosen in CHOICES[name]):
            known = ", ".join(CHOICES[name])
            raise ValueError(f"{name} must be one of {known}, got {chosen!r}")


def plan_or_error(cluster: ClusterProfile, **request: Any) -> Plan | ValueError:
    """What `search` returns for these arguments, or the error that says why there is no plan."""
    try:
        return search(cluster, **request)
    except ValueError as error:
        return error


def _sort_key(preference: float, plan: Plan) -> tuple[float, int, int]:
    """Seconds, multiplied for plans with recomputation or host state, which must be faster."""
    assert plan.prediction is not None
    seconds, memory = plan.prediction["step_seconds"], plan.prediction["memory_bytes"]
    if plan.host_state or any(unit.recomputed_on for unit in plan.units):
        seconds *= 1.0 + preference
    return seconds, sum(memory), plan.stage


def _at_least_one(name: str, value: int) -> int:
    if (count := positive_count(value)) is None:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return count
