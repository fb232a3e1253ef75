"""Why this plan: the predictions of the alternatives, as values that the page shows.

Everything follows from the profile, by the functions that chose the plan; nothing is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poplar.formatting import format_bytes, format_percent, format_ranks, format_seconds
from poplar.plan import STRATEGIES, Plan
from poplar.planner.baselines import POLICIES
from poplar.planner.prediction import Prediction, predict
from poplar.planner.what_if import plan_or_reason
from poplar.profile import ClusterProfile

_NOISE = 0.005
"""Predictions that differ by less count as equal."""
_EVEN_SHARES = 0.001

POLICY_DESCRIPTIONS = {
    "exact": "the fastest predicted plan",
    "even": "the same for every rank, as DDP, FSDP and DeepSpeed do",
    "flops": "samples in proportion to peak FLOP/s, as Whale does",
    "paper": "our reconstruction of Poplar as published",
}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another stage or policy, and its best plan."""

    name: str
    description: str
    plan: Plan | None
    prediction: Prediction | None
    obstacle: str = ""
    """Why there is no plan."""
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """Why a plan was chosen, in sentences, and the plans it was compared with."""

    prediction: Prediction | None
    """Of the chosen plan, as the planner predicted it; None if the profile cannot predict it."""
    sentences: tuple[str, ...]
    stages: tuple[Alternative, ...]
    """The best plan of each stage by the policy that chose."""
    policies: tuple[Alternative, ...]
    """The plan of each policy at the chosen stage."""


def reasons(profile: ClusterProfile, chosen: Plan) -> Reasons:
    """Compare the chosen plan with the other stages and the other policies."""
    policy = str((chosen.prediction or {}).get("policy", "exact"))
    policy = policy if policy in POLICIES else "exact"
    prediction = _stored_prediction(chosen) or _predicted(profile, chosen)
    stages = tuple(
        _alternative(profile, chosen, f"stage {stage}", description, (stage, policy), policy)
        for stage, description in enumerate(name.replace("_", " ") for name in STRATEGIES)
    )
    policies = tuple(
        _alternative(
            profile, chosen, name, POLICY_DESCRIPTIONS.get(name, ""), (chosen.stage, name), policy
        )
        for name in POLICIES
    )
    return Reasons(
        prediction=prediction,
        sentences=tuple(_sentences(profile, chosen, prediction, stages)),
        stages=stages,
        policies=policies,
    )


def _alternative(
    profile: ClusterProfile,
    chosen: Plan,
    name: str,
    description: str,
    choice: tuple[int, str],
    chosen_policy: str,
) -> Alternative:
    """The best plan of a choice of stage and policy; for the choice that was made, the chosen plan.

    All plans are predicted on the profile, so that they compare: trial runs may have changed the
    chosen plan's own prediction.
    """
    stage, policy = choice
    is_chosen = choice == (chosen.stage, chosen_policy)
    found = (
        chosen
        if is_chosen
        else plan_or_reason(
            profile, global_batch=chosen.global_batch, stages=(stage,), policy=policy
        )
    )
    plan = found if isinstance(found, Plan) else None
    return Alternative(
        name=name,
        description=description,
        plan=plan,
        prediction=None if plan is None else _predicted(profile, plan),
        obstacle=found if isinstance(found, str) else "",
        is_chosen=is_chosen,
    )


def _stored_prediction(plan: Plan) -> Prediction | None:
    """The prediction in the plan, which trial runs may have refined; None if it is incomplete."""
    stored = plan.prediction or {}
    names = [member.name for member in dataclasses.fields(Prediction)]
    if not all(name in stored for name in names):
        return None
    values: dict[str, Any] = {
        name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name]
        for name in names
    }
    return Prediction(**values)


def _predicted(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    try:
        return predict(profile, plan)
    except ValueError:
        return None  # a manual plan, with batches that were not measured


def _sentences(
    profile: ClusterProfile,
    chosen: Plan,
    prediction: Prediction | None,
    stages: Sequence[Alternative],
) -> Iterator[str]:
    if prediction is None:
        yield "This plan cannot be predicted: it goes beyond what was measured."
        return
    yield (
        f"A step is predicted to take {format_seconds(prediction.step_seconds)}, bound by "
        f"{prediction.bound}."
    )
    yield from _about_batches(profile, chosen, prediction)
    yield from _about_stage(chosen, stages)
    yield _about_shares(profile, chosen)
    if prediction.optimality_gap:
        yield (
            "On the measured curves, no other plan of this stage is faster by more than "
            f"{100 * prediction.optimality_gap:.1f} % of the step."
        )


def _about_batches(profile: ClusterProfile, chosen: Plan, prediction: Prediction) -> Iterator[str]:
    samples = [chosen.samples(rank) for rank in range(chosen.world_size)]
    if max(samples) == min(samples):
        yield "Every rank gets the same number of samples."
        return
    working = [rank for rank, count in enumerate(samples) if count]
    idle = [rank for rank, count in enumerate(samples) if not count]
    if idle:
        verb = "gets" if len(idle) == 1 else "get"
        yield (
            f"{format_ranks(idle).capitalize()} {verb} no samples: the step is shorter without "
            "their help."
        )
    most = max(working, key=samples.__getitem__)
    least = min(working, key=samples.__getitem__)
    if most != least:
        speeds = [_best_speed(profile, rank) for rank in (most, least)]
        compute = [prediction.compute_seconds[rank] for rank in working]
        shortest, longest = format_seconds(min(compute)), format_seconds(max(compute))
        compute_range = shortest if shortest == longest else f"{shortest} to {longest}"
        yield (
            f"Rank {most} gets {samples[most]} samples and rank {least} gets {samples[least]}: "
            f"alone, at their best batches, they run {speeds[0]:.1f} and {speeds[1]:.1f} samples/s."
            f" Ranks with samples compute for {compute_range}."
        )


def _best_speed(profile: ClusterProfile, rank: int) -> float:
    return max(point.batch / point.seconds for point in profile.devices[rank].points)


def _about_stage(chosen: Plan, stages: Sequence[Alternative]) -> Iterator[str]:
    seconds = {one.name: one.prediction.step_seconds for one in stages if one.prediction}
    own = seconds.pop(f"stage {chosen.stage}", None)
    if own is not None and seconds:
        best = min(seconds, key=seconds.__getitem__)
        ratio = seconds[best] / own - 1
        if ratio < -_NOISE:
            yield (
                f"{best.capitalize()} is predicted to be {format_percent(-ratio)} faster; "
                f"stage {chosen.stage} was requested, or was faster in trial runs."
            )
        elif ratio <= _NOISE:
            yield f"Stage {chosen.stage} is predicted to be as fast as {best}."
        else:
            yield (
                f"Stage {chosen.stage} is predicted to be the fastest; a step of the next, {best}, "
                f"takes {100 * ratio:.1f} % longer."
            )
    missing = [one.name for one in stages if one.plan is None]
    if missing:
        yield f"{', '.join(missing).capitalize()}: no plan fits into memory."


def _about_shares(profile: ClusterProfile, chosen: Plan) -> str:
    if chosen.stage == 0:
        return "Nothing is sharded at stage 0: every rank holds the whole training state."
    if max(chosen.shares) - min(chosen.shares) < _EVEN_SHARES:
        return "Every rank owns the same share of the training state."
    most = max(range(chosen.world_size), key=chosen.shares.__getitem__)
    share, memory = chosen.shares[most], profile.devices[most].memory_bytes
    return (
        f"Shares of the training state are uneven: rank {most} has the largest, "
        f"{format_percent(share)}, and {format_bytes(memory)} of memory."
    )
