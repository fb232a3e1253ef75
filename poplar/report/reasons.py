"""Why this plan: what the planner knew of the alternatives, as values that a page shows.

Everything follows from the profile alone, by the same functions that decided; nothing here is
measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poplar.plan import STRATEGIES, Plan
from poplar.planner.baselines import POLICIES
from poplar.planner.prediction import Prediction, predict
from poplar.planner.search import search
from poplar.profile import ClusterProfile
from poplar.report import words

_NOISE = 0.005
"""Predictions that differ by less are not told apart."""

POLICY_WORDS = {
    "exact": "the fastest predicted",
    "even": "the same for every rank, as DDP, FSDP and DeepSpeed do",
    "flops": "samples by peak FLOP/s, as Whale does",
    "paper": "our reconstruction of Poplar as published",
}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to decide, and the best plan that it comes to."""

    name: str
    what: str
    plan: Plan | None
    prediction: Prediction | None
    obstacle: str = ""
    """Why there is no plan."""
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Reasons:
    """What was decided, in sentences, and what it was held against."""

    prediction: Prediction | None
    """Of the chosen plan, as the planner said when it chose; None where nobody knows."""
    sentences: tuple[str, ...]
    stages: tuple[Alternative, ...]
    """The best plan of each stage by the policy that chose."""
    policies: tuple[Alternative, ...]
    """The plan of each policy at the chosen stage."""


def reasons(profile: ClusterProfile, chosen: Plan) -> Reasons:
    """Hold the chosen plan against the other stages and the other policies."""
    policy = str((chosen.prediction or {}).get("policy", "exact"))
    policy = policy if policy in POLICIES else "exact"
    prediction = _own_prediction(chosen) or _predicted(profile, chosen)
    stages = tuple(
        _alternative(
            profile,
            chosen,
            stage=stage,
            policy=policy,
            name=f"stage {stage}",
            what=STRATEGIES[stage].replace("_", " "),
            is_chosen=stage == chosen.stage,
        )
        for stage in range(len(STRATEGIES))
    )
    policies = tuple(
        _alternative(
            profile,
            chosen,
            stage=chosen.stage,
            policy=name,
            name=name,
            what=POLICY_WORDS.get(name, ""),
            is_chosen=name == policy,
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
    *,
    stage: int,
    policy: str,
    name: str,
    what: str,
    is_chosen: bool,
) -> Alternative:
    """The best plan by a policy at a stage: the chosen one, or what a search finds.

    All are predicted on the profile, so that they can be compared, whatever the chosen plan's own
    prediction was made of.
    """
    plan: Plan | None = chosen
    obstacle = ""
    if not is_chosen:
        try:
            plan = search(profile, global_batch=chosen.global_batch, stages=(stage,), policy=policy)
        except ValueError as error:
            plan, obstacle = None, str(error)
    return Alternative(
        name=name,
        what=what,
        plan=plan,
        prediction=None if plan is None else _predicted(profile, plan),
        obstacle=obstacle,
        is_chosen=is_chosen,
    )


def _own_prediction(plan: Plan) -> Prediction | None:
    """What the planner said when it chose, trials included; None for a plan from elsewhere."""
    said = plan.prediction or {}
    names = [member.name for member in dataclasses.fields(Prediction)]
    if not all(name in said for name in names):
        return None
    values: dict[str, Any] = {
        name: tuple(said[name]) if isinstance(said[name], list) else said[name] for name in names
    }
    return Prediction(**values)


def _predicted(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    try:
        return predict(profile, plan)
    except ValueError:
        return None  # a plan by hand, beyond what was measured


def _sentences(
    profile: ClusterProfile,
    chosen: Plan,
    prediction: Prediction | None,
    stages: Sequence[Alternative],
) -> list[str]:
    if prediction is None:
        return ["The profile says nothing of this plan: it goes beyond what was measured."]
    told = [
        f"A step is predicted to take {words.seconds(prediction.step_seconds)}, bound by "
        f"{prediction.bound}.",
        *_about_batches(profile, chosen, prediction),
        *_about_stage(chosen, stages),
        *_about_shares(profile, chosen),
    ]
    if prediction.optimality_gap:
        told.append(
            "No plan of this stage can be faster by more than "
            f"{100 * prediction.optimality_gap:.1f} % of the step on the measured curves."
        )
    return told


def _about_batches(profile: ClusterProfile, chosen: Plan, prediction: Prediction) -> list[str]:
    """Who gets the most and who the least, beside how fast they are."""
    samples = [chosen.samples(rank) for rank in range(chosen.world_size)]
    most, least = max(samples), min(samples)
    if most == least:
        return ["Every rank gets equally many samples."]
    idle = [rank for rank, count in enumerate(samples) if count == 0]
    told = []
    if idle:
        told.append(
            f"{words.ranks(idle).capitalize()} get{'s' if len(idle) == 1 else ''} no samples: the "
            "others are faster without."
        )
    working = [rank for rank, count in enumerate(samples) if count]
    compute = [prediction.compute_seconds[rank] for rank in working]
    first = max(working, key=lambda rank: samples[rank])
    last = min(working, key=lambda rank: samples[rank])
    if first != last:
        fast, slow = (_best_speed(profile, rank) for rank in (first, last))
        told.append(
            f"Rank {first} gets {samples[first]} samples and rank {last} {samples[last]}: alone, "
            f"at their best batches, they do {fast:.1f} and {slow:.1f} samples a second. The ranks "
            f"that compute do so for {words.seconds_range(compute)}."
        )
    return told


def _best_speed(profile: ClusterProfile, rank: int) -> float:
    return max(point.batch / point.seconds for point in profile.devices[rank].points)


def _about_stage(chosen: Plan, stages: Sequence[Alternative]) -> list[str]:
    told = []
    seconds = {s.name: s.prediction.step_seconds for s in stages if s.prediction is not None}
    own = seconds.pop(next(s.name for s in stages if s.is_chosen), None)
    if own is not None and seconds:
        best = min(seconds, key=seconds.__getitem__)
        ratio = seconds[best] / own - 1
        if ratio < -_NOISE:
            told.append(
                f"{best.capitalize()} is predicted to be {words.percent(-ratio)} shorter a step; "
                f"stage {chosen.stage} was asked for, or did better when both were tried."
            )
        elif ratio <= _NOISE:
            told.append(f"Stage {chosen.stage} is predicted to be as fast as {best}.")
        else:
            told.append(
                f"Stage {chosen.stage} is predicted to be the fastest; the next, {best}, takes "
                f"{100 * ratio:.1f} % longer a step."
            )
    missing = [s.name for s in stages if s.plan is None]
    if missing:
        told.append(f"{', '.join(missing).capitalize()}: no plan fits into memory.")
    return told


def _about_shares(profile: ClusterProfile, chosen: Plan) -> list[str]:
    if chosen.stage == 0:
        return ["Nothing is sharded at stage 0: every rank holds the whole training state."]
    if max(chosen.shares) - min(chosen.shares) < 0.001:
        return ["Every rank owns the same part of the training state."]
    most = max(range(chosen.world_size), key=lambda rank: chosen.shares[rank])
    return [
        f"Uneven shares of the training state: rank {most} owns most of it, "
        f"{words.percent(chosen.shares[most])}, and has "
        f"{words.size(profile.devices[most].memory_bytes)} of memory."
    ]
