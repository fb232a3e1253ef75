"""Whether a programme is faster than data parallelism, by prediction, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from poplar.planner.prediction import Prediction, predict
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.programme import Programme
from poplar.programmes.search.composition import data_parallel
from poplar.programmes.search.ratios import best_ratios, samples_within
from poplar.programmes.search.search import fastest_in
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_model import StepModel, StepSeconds
from poplar.programmes.search.step_terms import StepTerms
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.values.schema import to_json_types

MARGIN = 0.03
"""Gains that measurement does not resolve: a programme must be faster by more."""
_MAX_TURNS = 3
"""Most turns of programme and ratios."""
_SMALLEST_GAIN = 1e-3
"""Relative gain of a turn after which there is another one."""
_MAX_STATES = 25_000
"""Most states that a search continues, divided evenly over the numbers of placed nodes. They are
enough to search VGG of the examples completely. A search of so many takes about 0.5 s on a core.
"""


@dataclass(frozen=True, kw_only=True)
class ProgrammeDecision:
    """A programme, or why there is none."""

    programme: Programme | None
    """None: data parallelism with the plan is at least as fast, within `MARGIN`."""
    reason: str
    """Why there is a programme or none, as a sentence."""
    step_seconds: float
    """Predicted seconds of the programme, or else of the plan."""
    data_parallel_seconds: float
    """Predicted seconds of the plan."""
    memory_bytes: tuple[int, ...]
    """Predicted bytes by rank."""
    collectives: int = 0
    """Collectives on activations in a step."""
    activation_bytes: int = 0
    """Bytes per step, over all ranks, that these collectives send."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of `step_seconds` of the programme: compute, collectives, gradients and update."""

    def to_dict(self) -> dict[str, Any]:
        """This value as JSON types."""
        content: dict[str, Any] = to_json_types(self)
        return content


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A programme whose ratios are samples."""

    programme: Programme
    terms: StepTerms
    steps: StepSeconds
    """The parts of a step, predicted."""


def plan_programme(graph: Graph, cluster: ClusterProfile, plan: Plan) -> ProgrammeDecision:
    """The fastest programme, if it is predicted to be faster than a plan by more than `MARGIN`.

    A programme runs one pass per step on the whole global batch. Parameters that it replicates have
    gradients and optimizer state as at stage 1, with the shares of the plan.

    Args:
        graph: with the shapes of the plan's global batch.
        cluster: as it was measured.
        plan: data parallelism to compare with.

    Raises:
        DoesNotFit: the plan does not fit the cluster.
        ValueError: the plan is for another number of ranks.
    """
    known = predict(cluster, plan)
    model = StepModel(cluster, graph, plan)
    best, reason = (
        _fastest(model, plan) if plan.world_size > 1 else (None, "there is only one rank")
    )
    part = best.steps.total / known.step_seconds if best else math.inf
    if best and part < 1.0 - MARGIN:
        return _with_programme(model, best, known)
    if best:
        reason = (
            "no programme is predicted to be faster than data parallelism by more than "
            f"{100 * MARGIN:.0f} %: the fastest takes {part:.2f} of its time"
        )
    return ProgrammeDecision(
        programme=None,
        reason=reason,
        step_seconds=known.step_seconds,
        data_parallel_seconds=known.step_seconds,
        memory_bytes=known.memory_bytes,
    )


def _with_programme(model: StepModel, best: _Candidate, known: Prediction) -> ProgrammeDecision:
    programme, terms = best.programme, best.terms
    others = programme.world_size - 1.0
    sent = {"gather": others, "reduce": others, "exchange": others / programme.world_size}
    moved_bytes = (sent[moved.kind] * nbytes for moved, nbytes in terms.transfers.items())
    part = best.steps.total / known.step_seconds
    return ProgrammeDecision(
        programme=programme,
        reason=f"predicted to take {part:.2f} of the time of data parallelism",
        step_seconds=best.steps.total,
        data_parallel_seconds=known.step_seconds,
        memory_bytes=tuple(
            math.ceil(model.memory_bytes(terms, programme.ratios, rank))
            for rank in range(programme.world_size)
        ),
        collectives=sum(terms.calls.values()),
        activation_bytes=round(sum(moved_bytes)),
        seconds=best.steps._asdict(),
    )


def _fastest(model: StepModel, plan: Plan) -> tuple[_Candidate | None, str]:
    """The fastest programme that fits, and why there is none. Programme and ratios in turns."""
    best, space = None, SearchSpace.of(model.graph, restricted=True)
    reason = "no programme fits the memory of every rank with the whole batch in one pass"
    # A plan may have several passes per step.
    start = tuple(plan.samples(rank) for rank in range(plan.world_size))
    most = [device.max_batch for device in model.cluster.devices]
    ratios, replicated = samples_within(model.global_batch, start, most), 1.0
    if ratios is None:
        return None, (
            f"a programme computes the whole batch of {model.global_batch} samples in one "
            "pass, and the largest passes that were measured on all ranks have fewer together"
        )
    for _ in range(_MAX_TURNS):
        costs = model.costs(ratios, replicated)
        if not all(map(math.isfinite, costs.compute.whole)):
            reason = "the search found no programme that is as fast as data parallelism"
            break
        found = fastest_in(space, costs, width=_MAX_STATES // len(space.nodes))
        programme = found or data_parallel(model.graph, ratios)
        terms = StepTerms.of(model.graph, programme)
        better = best_ratios(model, terms, ratios)
        if better is None:
            break
        steps = model.step(terms, better)
        gain = math.inf if best is None else 1.0 - steps.total / best.steps.total
        if gain > 0.0:
            divided = replace(programme, ratios=better, shares=model.shares)
            best = _Candidate(divided, terms, steps)
        reached = (better, terms.replicated_fraction)
        if gain < _SMALLEST_GAIN or (ratios, replicated) == reached:
            break
        ratios, replicated = reached
    return best, reason
