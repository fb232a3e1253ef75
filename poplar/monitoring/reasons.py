"""Why this plan: predictions of other stages and policies, and what would make a step shorter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from poplar.planner.explain import explain
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import Prediction, predict
from poplar.planner.search import POLICIES, plan_or_error
from poplar.values.formatting import format_ranks, format_seconds
from poplar.values.plan import STRATEGIES, Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import from_fields

_MAX_CHANGES = 3

POLICY_DESCRIPTIONS = {
    "exact": "the fastest predicted plan",
    "even": "the same for every rank, as DDP, FSDP and DeepSpeed do",
    "flops": "samples in proportion to peak FLOP/s, as Whale does",
    "paper": "our reconstruction of Poplar as published",
    "even_shares": "the fastest batches beside even shares, as DDP and FSDP2 can run them",
}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another stage or policy, and its best plan."""

    name: str
    description: str
    plan: Plan | None = None
    prediction: Prediction | None = None
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
    policy = str((chosen.prediction or {}).get("policy"))
    policy = policy if policy in POLICIES else "exact"

    def alternative(name: str, description: str, stage: int, other: str) -> Alternative:
        """The best plan of this stage by the other policy."""
        is_chosen = (stage, other) == (chosen.stage, policy)
        request = {"global_batch": chosen.global_batch, "stages": (stage,), "policy": other}
        found = chosen if is_chosen else plan_or_error(profile, **request)
        if isinstance(found, ValueError):
            return Alternative(name=name, description=description, obstacle=str(found))
        return Alternative(
            name=name,
            description=description,
            plan=found,
            # Not the plan's own prediction, which trial runs may have changed.
            prediction=predicted(profile, found),
            is_chosen=is_chosen,
        )

    stages = tuple(
        alternative(f"stage {stage}", name.replace("_", " "), stage, policy)
        for stage, name in enumerate(STRATEGIES)
    )
    policies = tuple(
        alternative(name, POLICY_DESCRIPTIONS[name], chosen.stage, name) for name in POLICIES
    )
    prediction = _stored_prediction(chosen) or predicted(profile, chosen)
    sentences = tuple(_sentences(profile, chosen, prediction))
    return Reasons(prediction=prediction, sentences=sentences, stages=stages, policies=policies)


def _stored_prediction(plan: Plan) -> Prediction | None:
    """The prediction in the plan, which trial runs may have refined; None if it is incomplete."""
    stored = plan.prediction or {}
    names = {member.name for member in dataclasses.fields(Prediction)}
    if not names <= stored.keys():
        return None
    return from_fields(Prediction, {name: stored[name] for name in names})


def predicted(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    """The prediction; None for a plan beyond what was measured, or that does not fit."""
    try:
        return predict(profile, plan)
    except ValueError:
        return None


def _sentences(
    profile: ClusterProfile, chosen: Plan, prediction: Prediction | None
) -> Iterator[str]:
    if prediction is None:
        yield "This plan cannot be predicted: it goes beyond what was measured."
        return
    yield (
        f"A step is predicted to take {format_seconds(prediction.step_seconds)}, bound by "
        f"{prediction.bound}."
    )
    yield from _about_batches(profile, chosen)
    if prediction.optimality_gap:
        yield (
            "On the measured curves, no other plan of this stage is faster by more than "
            f"{100 * prediction.optimality_gap:.1f} % of the step."
        )
    with suppress(DoesNotFit):
        explanation = explain(profile, chosen)
        for sentence in explanation.sentences()[1:]:
            yield f"{sentence[0].upper()}{sentence[1:]}."
        for change in explanation.changes[:_MAX_CHANGES]:
            yield f"What would help: {change}."


def _about_batches(profile: ClusterProfile, chosen: Plan) -> Iterator[str]:
    samples = [chosen.samples(rank) for rank in range(chosen.world_size)]
    if max(samples) == min(samples):
        yield "Every rank gets the same number of samples."
        return
    working = [rank for rank, count in enumerate(samples) if count]
    idle = [rank for rank, count in enumerate(samples) if not count]
    if idle:
        ranks, verb = format_ranks(idle).capitalize(), "gets" if len(idle) == 1 else "get"
        yield f"{ranks} {verb} no samples: the step is shorter without."
    most = max(working, key=samples.__getitem__)
    least = min(working, key=samples.__getitem__)
    if samples[most] != samples[least]:
        speeds = [
            max(point.batch / point.seconds for point in profile.devices[rank].points)
            for rank in (most, least)
        ]
        yield (
            f"Rank {most} gets {samples[most]} samples and rank {least} gets {samples[least]}: "
            f"alone, at their best batches, they run {speeds[0]:.1f} and {speeds[1]:.1f} samples/s."
        )
