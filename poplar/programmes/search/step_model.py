"""Predicted seconds and bytes of a step with a programme, on a measured cluster.

A step is compute, collectives on activations, gradients of replicated parameters as at stage 1, and
the optimizer on each rank's part:

    compute      every node at its slowest rank. A data-parallel pass of rank `r` takes the measured
                 `t_r(b)`: a part per pass, which no division makes shorter, and a rest in
                 proportion to the rank's part of the work. Work is counted in operations.
    collectives  latency and bytes over the rate of the busiest link, nothing of it overlapped
    gradients    the closed form of stage 1 (`cost_model`), for the replicated part of the model
    optimizer    in proportion to the elements that a rank updates
    residual     of steps at stage 1; a negative one hides at most the gradients

So for data parallelism with one pass per rank, it is the prediction of the plan at stage 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from poplar.planner.communication_schedule import CommunicationSeconds, Synchronization
from poplar.planner.cost_model import StageCosts, residual_of
from poplar.planner.memory_model import SLACK_BYTES, Caps
from poplar.programmes.graph.graph import Graph, TensorType
from poplar.programmes.graph.placement import Placement, Sharded, cut
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.data_parallel import data_parallel
from poplar.programmes.search.links import ActivationLinks
from poplar.programmes.search.step_terms import (
    EVEN,
    WHOLE,
    StepTerms,
    Transfer,
    transfers_of,
    work_of,
)
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

STAGE = 1
"""Of replicated parameters."""
_ACCUMULATOR_BYTES = 4.0
"""Of a gradient, per element."""
_MOST_FIXED = 0.9
"""Of a pass, the part that may be independent of the batch."""


@lru_cache(4096)
def parts_of(units: int, ratios: tuple[int, ...]) -> tuple[float, ...]:
    """By rank, its part of a dimension of so many units."""
    if units == WHOLE:
        return (1.0,) * len(ratios)
    if units == EVEN:
        return (1.0 / len(ratios),) * len(ratios)
    bounds = cut(units, ratios)
    return tuple((after - before) / units for before, after in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """By rank, seconds of computing a part of the whole batch."""

    fixed: tuple[float, ...]
    """Of a pass, whatever the part."""
    whole: tuple[float, ...]
    """Of all work, beyond `fixed`."""

    def slowest(self, parts: Sequence[float]) -> float:
        """Seconds of the slowest rank, if each computes its part of all work."""
        return max(
            fixed + part * whole
            for fixed, part, whole in zip(self.fixed, parts, self.whole, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCosts:
    """Costs of the parts of a programme for the search, on a measured cluster."""

    ratios: tuple[int, ...]
    compute: RankSeconds
    work: float
    """Of the whole graph."""
    links: ActivationLinks
    element_seconds: float
    """Of the gradient and the update of an element that every rank has."""

    def compute_seconds(self, pattern: Pattern, strategy: Strategy, *, trained: bool) -> float:
        """Of a node at the slowest rank."""
        units = pattern.sizes[strategy.axis] // strategy.unit if strategy.axis else WHOLE
        work = work_of(pattern, trained=trained)
        parts = parts_of(max(1, units) if strategy.axis else WHOLE, self.ratios)
        return self.compute.slowest(parts) * work / self.work

    def move_seconds(
        self, kind: TensorType, source: Placement, target: Placement, *, trained: bool
    ) -> float:
        """Of a collective, and of its adjoint in the backward pass."""
        if len(self.ratios) == 1:
            return 0.0
        return math.fsum(
            transfer_seconds(self.links, transfer, self.ratios, kind.nbytes)
            for transfer in transfers_of(kind, source, target, trained=trained)
        )

    def gradient_seconds(self, kind: TensorType, placement: Placement) -> float:
        """Of a parameter's gradient and update."""
        return 0.0 if isinstance(placement, Sharded) else self.element_seconds * kind.numel


def transfer_seconds(
    links: ActivationLinks,
    transfer: Transfer,
    ratios: tuple[int, ...],
    nbytes: float,
    calls: int = 1,
) -> float:
    """Seconds of collectives on so many bytes together."""
    sides = [parts_of(units, ratios) for units in transfer.units]
    if transfer.kind == "gather":
        return calls * links.moving.latency + nbytes * links.all_gather(*sides)
    if transfer.kind == "reduce":
        return calls * links.reducing.latency + nbytes * links.reduce_scatter(*sides)
    return calls * links.moving.latency + nbytes * links.all_to_all(*sides)


class StepSeconds(NamedTuple):
    """The parts of a predicted step."""

    compute: float
    collectives: float
    gradients: float
    """Exposed seconds of the reduction."""
    update: float
    """The optimizer and the all-gather of replicated parameters."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return math.fsum(self)


class StepModel:
    """Predicts steps of programmes of one graph on one cluster.

    Args:
        cluster: as it was measured.
        graph: with the shapes of the global batch.
        plan: its global batch, and its shares for the state of replicated parameters.
    """

    def __init__(self, cluster: ClusterProfile, graph: Graph, plan: Plan) -> None:
        self.cluster, self.graph = cluster, graph
        self.global_batch, self.shares = plan.global_batch, plan.shares
        self.stage = StageCosts(cluster, STAGE)
        self.links = ActivationLinks.of(self.stage)
        ones = (1,) * cluster.world_size
        self.data_parallel = StepTerms.of(graph, data_parallel(graph, ones))
        self.work = max(1.0, math.fsum(self.data_parallel.work.values()))

    def with_shares(self, shares: tuple[float, ...]) -> StepModel:
        """The same model, with these shares for the state of replicated parameters."""
        other = copy(self)
        other.shares = shares
        vars(other).pop("_communication", None)
        return other

    @cached_property
    def _communication(self) -> tuple[float, float]:
        """Seconds of reducing and gathering the whole model."""
        reduce = self.stage.communication(self.shares).reduce
        return reduce, self.stage.gather_after_step_seconds(self.shares)

    def samples(self, ratios: tuple[int, ...]) -> tuple[int, ...]:
        """Of each rank."""
        bounds = cut(self.global_batch, ratios)
        return tuple(after - before for before, after in pairwise(bounds))

    def costs(self, ratios: tuple[int, ...], replicated: float = 1.0) -> ClusterCosts:
        """Costs for the search.

        Args:
            ratios: of the programmes.
            replicated: the part of the model that every rank has, about: the more gradients there
                are, the less of them overlaps.
        """
        compute = self.rank_seconds(ratios)
        latest = self._compute(self.data_parallel, ratios, compute)
        small = max(0.0, replicated - 0.5)
        seconds = [sum(self._replicated_seconds(latest, part)) for part in (small, small + 0.5)]
        price = (seconds[1] - seconds[0]) / (0.5 * self.cluster.model.numel)
        return ClusterCosts(
            ratios=ratios,
            compute=compute,
            work=self.work,
            links=self.links,
            element_seconds=max(0.0, price),
        )

    def rank_seconds(self, ratios: tuple[int, ...]) -> RankSeconds:
        """Compute of each rank, from its measured passes of about as many samples."""
        fixed, whole = [], []
        for rank, samples in enumerate(self.samples(ratios)):
            one, rest = self._line(rank, samples)
            part = samples / self.global_batch
            if samples:
                part = self._worked(ratios)[rank]
            fixed.append(one)
            whole.append(rest / part if part else rest)
        return RankSeconds(tuple(fixed), tuple(whole))

    def _worked(self, ratios: tuple[int, ...]) -> list[float]:
        """By rank, its part of all work under data parallelism."""
        worked = [0.0] * len(ratios)
        for units, work in self.data_parallel.work.items():
            for rank, part in enumerate(parts_of(units, ratios)):
                worked[rank] += part * work / self.work
        return worked

    def _line(self, rank: int, samples: int) -> tuple[float, float]:
        """Seconds of a pass that its batch does not change, and the rest of them.

        Without samples: none, and the rest of a pass of the global batch.
        """
        largest = self.cluster.devices[rank].max_batch
        if samples == 0:
            _, rest = self._line(rank, largest)
            return 0.0, rest * self.global_batch / largest
        seconds = self.stage.pass_seconds(rank, samples)
        if not math.isfinite(seconds):
            return 0.0, math.inf
        other = samples // 2 or 2
        if other > largest:
            return 0.0, seconds
        slope = (seconds - self.stage.pass_seconds(rank, other)) / (samples - other)
        fixed = min(max(0.0, seconds - slope * samples), _MOST_FIXED * seconds)
        return fixed, seconds - fixed

    def step(self, terms: StepTerms, ratios: tuple[int, ...]) -> StepSeconds:
        """The parts of a step, predicted.

        Args:
            terms: of the programme.
            ratios: of the programme.
        """
        compute = self.compute_seconds(terms, ratios)
        if not math.isfinite(compute):
            return StepSeconds(math.inf, 0.0, 0.0, 0.0)
        moved = self._moved(terms, ratios)
        exposed, gathered = self._replicated_seconds(compute, terms.replicated_fraction)
        optimizer = max(
            self.stage.optimizer_seconds(rank, owned)
            for rank, owned in enumerate(self._owned(terms, ratios))
        )
        residual = self._residual(terms.replicated_fraction)
        return StepSeconds(compute, moved, exposed, max(0.0, optimizer + gathered + residual))

    def compute_seconds(self, terms: StepTerms, ratios: tuple[int, ...]) -> float:
        """Of a programme; infinite for batches that were not measured."""
        return self._compute(terms, ratios, self.rank_seconds(ratios))

    def _compute(self, terms: StepTerms, ratios: tuple[int, ...], seconds: RankSeconds) -> float:
        return math.fsum(
            seconds.slowest(parts_of(units, ratios)) * work / self.work
            for units, work in terms.work.items()
        )

    def _moved(self, terms: StepTerms, ratios: tuple[int, ...]) -> float:
        if len(ratios) == 1:
            return 0.0
        links = self.links
        latencies = math.fsum(
            count * (links.reducing if kind == "reduce" else links.moving).latency
            for kind, count in terms.calls.items()
        )
        return latencies + math.fsum(
            transfer_seconds(links, transfer, ratios, nbytes, calls=0)
            for transfer, nbytes in terms.transfers.items()
        )

    def _replicated_seconds(self, compute: float, part: float) -> tuple[float, float]:
        """Exposed seconds of reducing this part of the model, and those of gathering it."""
        reduce, gather = self._communication
        synchronization = self.synchronization(compute)
        communication = CommunicationSeconds(0.0, part * reduce)
        ended = self.stage.synchronizations_seconds([synchronization], communication)[0]
        return ended - compute, part * gather

    def _residual(self, part: float) -> float:
        """Of a step in which this part of the model is reduced; for all of it, that of a plan."""
        measured, (reduce, _) = self.stage.step_residual, self._communication
        return residual_of(measured, part * max(reduce, -measured))

    def synchronization(self, compute: float) -> Synchronization:
        """Of the gradients of replicated parameters, after so many seconds of compute."""
        return Synchronization(compute, compute * (1.0 - self.stage.reducible_fraction))

    def _owned(self, terms: StepTerms, ratios: tuple[int, ...]) -> list[float]:
        """By rank, the part of the model that it updates."""
        replicated = [terms.replicated_fraction * share for share in self.shares]
        return list(map(operator.add, replicated, self.sharded(terms, ratios)))

    def sharded(self, terms: StepTerms, ratios: tuple[int, ...]) -> list[float]:
        """By rank, the part of the model that the programme gives to it alone."""
        total = max(1, terms.replicated + sum(terms.sharded.values()))
        owned = [0.0] * len(ratios)
        for units, numel in terms.sharded.items():
            for rank, part in enumerate(parts_of(units, ratios)):
                owned[rank] += part * numel / total
        return owned

    def memory_bytes(self, terms: StepTerms, ratios: tuple[int, ...], rank: int) -> float:
        """Bytes that a rank needs; infinite for batches that were not measured.

        Those of data parallelism at stage 1 with the same samples; sharded parameters, their
        gradients and their state only as far as the rank has them; and what this programme holds of
        activations beyond the rank's part of the samples.
        """
        model, samples = self.cluster.model, self.samples(ratios)[rank]
        if samples > self.cluster.devices[rank].max_batch:
            return math.inf
        share = self.shares[rank]
        needed = self.stage.memories[rank].needed(Caps(samples), share)
        always = model.param_bytes + _ACCUMULATOR_BYTES
        for units, numel in terms.sharded.items():
            part = parts_of(units, ratios)[rank]
            needed += numel * (always * (part - 1.0) + model.optimizer_bytes * (part - share))
        held = [
            math.fsum(parts_of(units, ratios)[rank] * n for units, n in own.held.items())
            for own in (terms, self.data_parallel)
        ]
        return needed + max(0.0, held[0] - held[1])

    def memory_limit(self, rank: int) -> float:
        """Bytes that a programme may use."""
        return self.stage.memories[rank].limit + SLACK_BYTES

    def fits(self, terms: StepTerms, ratios: tuple[int, ...]) -> bool:
        """Whether every rank has the memory."""
        return all(
            self.memory_bytes(terms, ratios, rank) <= self.memory_limit(rank)
            for rank in range(len(ratios))
        )
