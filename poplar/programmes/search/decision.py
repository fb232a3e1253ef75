"""Whether a programme is faster than data parallelism, by prediction, and why."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from poplar.planner.prediction import predict
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.search.data_parallel import data_parallel
from poplar.programmes.search.ratios import best_ratios
from poplar.programmes.search.search import SearchTooLong, fastest_in
from poplar.programmes.search.shares import best_shares
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_model import StepModel, StepSeconds
from poplar.programmes.search.step_terms import StepTerms, transfers_of
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
enough to search the encoder, ViT and VGG of the examples completely, and not the mixture of
experts. A search of so many takes about 0.3 s on a core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters whose names differ only in numbers, with the same placement."""

    name: str
    """Their name, with `*` for numbers."""
    count: int
    numel: int
    """Elements of all members."""
    placement: Placement
    gradient_bytes_saved: int
    """Bytes per step, over all ranks, that reducing the gradients and gathering the parameters
    would have sent; 0 if they are replicated."""


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
    groups: tuple[ParameterGroup, ...] = ()
    """The programme's parameters, most elements first."""
    forward_collectives: int = 0
    """Collectives on activations in the forward of a pass."""
    backward_collectives: int = 0
    activation_bytes: int = 0
    """Bytes per step, over all ranks, that these collectives send."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of `step_seconds` of the programme: compute, collectives, gradients and update."""
    states: int = 0
    """Number of states that the search visited."""
    is_complete: bool = True
    """Whether the search left no state out for its width."""
    planning_seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """This value as JSON types."""
        content: dict[str, Any] = to_json_types(self)
        return content


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A programme whose ratios are samples."""

    programme: Programme
    terms: StepTerms
    model: StepModel
    """The model with the shares of the programme."""

    @property
    def steps(self) -> StepSeconds:
        """The parts of a step, predicted."""
        return self.model.step(self.terms, self.programme.ratios)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.steps.total


def plan_programme(
    graph: Graph, cluster: ClusterProfile, plan: Plan, *, margin: float = MARGIN
) -> ProgrammeDecision:
    """The fastest programme, if it is predicted to be faster than a plan.

    A programme runs one pass per step on the whole global batch. Parameters that it replicates have
    gradients and optimizer state as at stage 1, with shares of their own.

    Args:
        graph: with the shapes of the plan's global batch.
        cluster: as it was measured.
        plan: data parallelism to compare with.
        margin: fraction of the plan's step by which a programme must be faster.

    Raises:
        DoesNotFit: the plan does not fit the cluster.
        ValueError: the plan is for another number of ranks, or the graph for another batch.
    """
    begin = time.perf_counter()
    known = predict(cluster, plan)
    batch = {n.output.shape[0] for n in graph.batch.values() if n.output.shape}
    if batch and plan.global_batch not in batch:
        raise ValueError(
            f"the graph is of a batch of {max(batch)} samples, but the plan's global batch is "
            f"{plan.global_batch}; export the loss with a global batch"
        )
    search = _Turns(StepModel(cluster, graph, plan), plan)
    best, reason = search.best() if plan.world_size > 1 else (None, "there is only one rank")
    limit = known.step_seconds * (1.0 - margin)
    if best is not None and best.seconds >= limit:
        part = best.seconds / known.step_seconds
        reason = (
            "no programme is predicted to be faster than data parallelism by more than "
            f"{100 * margin:.0f} %: the fastest takes {part:.2f} of its time"
        )
    is_chosen = best is not None and best.seconds < limit
    if best is None or not is_chosen:
        return ProgrammeDecision(
            programme=None,
            reason=reason,
            step_seconds=known.step_seconds,
            data_parallel_seconds=known.step_seconds,
            memory_bytes=known.memory_bytes,
            states=search.states,
            is_complete=search.is_complete,
            planning_seconds=time.perf_counter() - begin,
        )
    forward, backward = _collectives(graph, best)
    ratios, model = best.programme.ratios, best.model
    return ProgrammeDecision(
        programme=best.programme,
        reason=f"predicted to take {best.seconds / known.step_seconds:.2f} of the time of data "
        "parallelism",
        step_seconds=best.seconds,
        data_parallel_seconds=known.step_seconds,
        memory_bytes=tuple(
            math.ceil(model.memory_bytes(best.terms, ratios, rank)) for rank in range(len(ratios))
        ),
        groups=tuple(_groups(graph, cluster, best.programme)),
        forward_collectives=forward,
        backward_collectives=backward,
        activation_bytes=_activation_bytes(best),
        seconds=best.steps._asdict(),
        states=search.states,
        is_complete=search.is_complete,
        planning_seconds=time.perf_counter() - begin,
    )


class _Turns:
    """Programme, ratios and shares in turns."""

    def __init__(self, model: StepModel, plan: Plan) -> None:
        self.model = model
        self.start = tuple(plan.samples(rank) for rank in range(plan.world_size))
        self.space = SearchSpace.of(model.graph, fold=True, restricted=True)
        self.states, self.is_complete = 0, True

    def best(self) -> tuple[_Candidate | None, str]:
        """The fastest programme that fits, and why there is none."""
        best: _Candidate | None = None
        reason = "no programme fits the memory of every rank with the whole batch in one pass"
        ratios, replicated = self._measured(), 1.0
        if ratios is None:
            return None, (
                f"a programme computes the whole batch of {self.model.global_batch} samples in one "
                "pass, and the largest passes that were measured on all ranks have fewer together"
            )
        for _ in range(_MAX_TURNS):
            programme = self._fastest(ratios, replicated)
            if programme is None:
                reason = "the search found no programme that is as fast as data parallelism"
                break
            terms = StepTerms.of(self.model.graph, programme)
            better = best_ratios(self.model, terms, ratios)
            if better is None:
                break
            self.model = self.model.with_shares(best_shares(self.model, terms, better))
            found = _Candidate(self._divided_as(programme, better), terms, self.model)
            gain = math.inf if best is None else 1.0 - found.seconds / best.seconds
            if gain > 0.0:
                best = found
            if gain < _SMALLEST_GAIN:
                break
            if (ratios, replicated) == (better, terms.replicated_fraction):
                break
            ratios, replicated = better, terms.replicated_fraction
        return best, reason

    def _divided_as(self, programme: Programme, ratios: tuple[int, ...]) -> Programme:
        """The programme with these ratios, and the shares of the model."""
        return dataclasses.replace(programme, ratios=ratios, shares=self.model.shares)

    def _measured(self) -> tuple[int, ...] | None:
        """The plan's samples, moved to other ranks where no pass of so many was measured: a plan
        may have several passes per step. None: one pass cannot take the whole batch.
        """
        most = [device.max_batch for device in self.model.cluster.devices]
        samples = [min(own, bound) for own, bound in zip(self.start, most, strict=True)]
        for rank, bound in enumerate(most):
            missing = self.model.global_batch - sum(samples)
            samples[rank] += min(missing, bound - samples[rank])
        return tuple(samples) if sum(samples) == self.model.global_batch else None

    def _fastest(self, ratios: tuple[int, ...], replicated: float) -> Programme | None:
        costs = self.model.costs(ratios, replicated)
        if not all(map(math.isfinite, costs.compute.whole)):
            return None
        try:
            width = _MAX_STATES // len(self.space.nodes)
            found = fastest_in(self.space, costs, limit=2 * _MAX_STATES, width=width)
        except SearchTooLong:
            found = None
        if found is None:
            self.is_complete = False
            return data_parallel(self.model.graph, ratios)
        self.states += found.states
        self.is_complete &= found.is_complete
        return found.programme


def _collectives(graph: Graph, best: _Candidate) -> tuple[int, int]:
    """Calls that communicate, in the forward and in the backward pass."""
    forward = 0
    for moved in best.programme.collectives:
        kind = graph.nodes[moved.node].output
        forward += len(transfers_of(kind, moved.source, moved.target, trained=False))
    return forward, sum(best.terms.calls.values()) - forward


def _groups(
    graph: Graph, cluster: ClusterProfile, programme: Programme
) -> Iterator[ParameterGroup]:
    model, others = cluster.model, cluster.world_size - 1
    members: dict[tuple[str, Placement], list[str]] = {}
    for source, node in graph.parameters.items():
        key = re.sub(r"\d+", "*", source), programme.placements[node.name]
        members.setdefault(key, []).append(node.name)
    sizes = {
        key: sum(graph.nodes[name].output.numel for name in names) for key, names in members.items()
    }
    for key in sorted(members, key=lambda key: -sizes[key]):
        name, placement = key
        saved = 0.0
        if isinstance(placement, Sharded):
            saved = sizes[key] * others * (model.wire_bytes + model.param_bytes)
        yield ParameterGroup(
            name=name,
            count=len(members[key]),
            numel=sizes[key],
            placement=placement,
            gradient_bytes_saved=round(saved),
        )


def _activation_bytes(best: _Candidate) -> int:
    """Bytes that all ranks together send for activations and their gradients."""
    ranks = best.programme.world_size
    sent = {"gather": ranks - 1.0, "reduce": ranks - 1.0, "exchange": 1.0 - 1.0 / ranks}
    transfers = best.terms.transfers.items()
    return round(sum(sent[transfer.kind] * nbytes for transfer, nbytes in transfers))
