"""Why this plan: its prediction, and what would make a step shorter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from poplar.planner.explain import explain
from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import Prediction, predict
from poplar.values.formatting import format_ranks, format_seconds
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import from_fields

_MAX_CHANGES = 3


def prediction_of(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    """The prediction in the plan, which trial runs may have refined, or that of the profile.

    None: the profile cannot predict the plan.
    """
    stored = plan.prediction or {}
    names = {member.name for member in dataclasses.fields(Prediction)}
    if names <= stored.keys():
        return from_fields(Prediction, {name: stored[name] for name in names})
    return predicted(profile, plan)


def predicted(profile: ClusterProfile, plan: Plan) -> Prediction | None:
    """The prediction; None for a plan beyond what was measured, or that does not fit."""
    try:
        return predict(profile, plan)
    except ValueError:
        return None


def reasons(profile: ClusterProfile, chosen: Plan, prediction: Prediction | None) -> Iterator[str]:
    """Why a plan was chosen, in sentences."""
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
