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
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from poplar.planner.communication_schedule import CommunicationSeconds, Synchronization
from poplar.planner.cost_model import StageCosts, residual_of
from poplar.planner.memory_model import SLACK_BYTES, Caps
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import part_sizes
from poplar.programmes.search.composition import data_parallel
from poplar.programmes.search.costs import ClusterCosts, RankSeconds, measured_links
from poplar.programmes.search.step_terms import StepTerms, parts_of
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

STAGE = 1
"""Stage of replicated parameters."""
_ACCUMULATOR_BYTES = 4.0
"""Bytes of a gradient per element."""
_MOST_FIXED = 0.9
"""The largest part of a pass that may be independent of the batch."""


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
        self.links = measured_links(self.stage)
        ones = (1,) * cluster.world_size
        self.data_parallel = StepTerms.of(graph, data_parallel(graph, ones))
        self.work = max(1.0, math.fsum(self.data_parallel.work.values()))

    @cached_property
    def _communication(self) -> tuple[float, float]:
        """Seconds of reducing and gathering the whole model."""
        reduce = self.stage.communication(self.shares).reduce
        return reduce, self.stage.gather_after_step_seconds(self.shares)

    def samples(self, ratios: tuple[int, ...]) -> tuple[int, ...]:
        """Samples of each rank."""
        return part_sizes(self.global_batch, ratios)

    def costs(self, ratios: tuple[int, ...], replicated: float = 1.0) -> ClusterCosts:
        """Costs for the search.

        Args:
            replicated: the part of the model that every rank has, about: the more gradients there
                are, the less of them overlaps.
        """
        costs = self._costs(ratios)
        latest = costs.compute_seconds(self.data_parallel.work)
        small = max(0.0, replicated - 0.5)
        seconds = [sum(self._replicated_seconds(latest, part)) for part in (small, small + 0.5)]
        price = (seconds[1] - seconds[0]) / (0.5 * self.cluster.model.numel)
        return replace(costs, element_seconds=max(0.0, price))

    def _costs(self, ratios: tuple[int, ...]) -> ClusterCosts:
        """Costs of compute and of collectives."""
        compute, (reducing, moving) = self.rank_seconds(ratios), self.links
        return ClusterCosts(
            ratios=ratios, compute=compute, work=self.work, reducing=reducing, moving=moving
        )

    def rank_seconds(self, ratios: tuple[int, ...]) -> RankSeconds:
        """Compute of each rank, from its measured passes of about as many samples."""
        fixed, whole, worked = [], [], self._worked(ratios)
        for rank, samples in enumerate(self.samples(ratios)):
            one, rest = self._line(rank, samples)
            part = worked[rank] if samples else 0.0
            fixed.append(one)
            whole.append(rest / part if part else rest)
        return RankSeconds(tuple(fixed), tuple(whole))

    def _worked(self, ratios: tuple[int, ...]) -> list[float]:
        """The part of each rank of all work under data parallelism."""
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
        """The parts of a step, predicted."""
        costs = self._costs(ratios)
        compute = costs.compute_seconds(terms.work)
        if not math.isfinite(compute):
            return StepSeconds(math.inf, 0.0, 0.0, 0.0)
        moved = costs.collective_seconds(terms.transfers, terms.calls)
        exposed, gathered = self._replicated_seconds(compute, terms.replicated_fraction)
        optimizer = max(
            self.stage.optimizer_seconds(rank, owned)
            for rank, owned in enumerate(self._owned(terms, ratios))
        )
        residual = self._residual(terms.replicated_fraction)
        return StepSeconds(compute, moved, exposed, max(0.0, optimizer + gathered + residual))

    def _replicated_seconds(self, compute: float, part: float) -> tuple[float, float]:
        """Exposed seconds of reducing this part of the model, and those of gathering it."""
        reduce, gather = self._communication
        synchronization = Synchronization(compute, compute * (1.0 - self.stage.reducible_fraction))
        communication = CommunicationSeconds(0.0, part * reduce)
        ended = self.stage.synchronizations_seconds([synchronization], communication)[0]
        return ended - compute, part * gather

    def _residual(self, part: float) -> float:
        """The residual of a step that reduces this part of the model; for all of it, a plan's."""
        measured, (reduce, _) = self.stage.step_residual, self._communication
        return residual_of(measured, part * max(reduce, -measured))

    def _owned(self, terms: StepTerms, ratios: tuple[int, ...]) -> list[float]:
        """The part of the model that each rank updates."""
        total = max(1, terms.replicated + sum(terms.sharded.values()))
        owned = [terms.replicated_fraction * share for share in self.shares]
        for units, numel in terms.sharded.items():
            for rank, part in enumerate(parts_of(units, ratios)):
                owned[rank] += part * numel / total
        return owned

    def memory_bytes(self, terms: StepTerms, ratios: tuple[int, ...], rank: int) -> float:
        """Bytes that a rank needs; infinite for batches that were not measured.

        Those of data parallelism at stage 1 with the same samples; sharded parameters, their
        gradients and their state only as far as the rank has them; and what this programme holds of
        activations beyond the rank's part of the samples. It recomputes none, so that of a model
        with checkpointing it holds those that data parallelism does not.
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
        for units, nbytes in terms.frozen.items():
            needed += nbytes * (parts_of(units, ratios)[rank] - 1.0)
        held = [
            math.fsum(parts_of(units, ratios)[rank] * n for units, n in own.held.items())
            for own in (terms, self.data_parallel)
        ]
        measured = self.cluster.devices[rank].activation_bytes(samples)
        return needed + max(0.0, held[0] - min(held[1], measured))

    def memory_limit(self, rank: int) -> float:
        """Bytes that a programme may use."""
        return self.stage.memories[rank].limit + SLACK_BYTES

    def fits(self, terms: StepTerms, ratios: tuple[int, ...]) -> bool:
        """Whether every rank has the memory."""
        return all(
            self.memory_bytes(terms, ratios, rank) <= self.memory_limit(rank)
            for rank in range(len(ratios))
        )
