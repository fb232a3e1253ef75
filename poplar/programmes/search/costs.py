"""Seconds of the parts of a programme on a measured cluster: nodes, collectives, gradients.

The search adds them up node by node; a whole programme has them as sums (`StepTerms`). Collectives
take the time of the busiest link of the direct algorithm, in which every rank sends each other rank
its part at once, by the rates of the measured collectives on the model (`collective_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poplar.planner.collective_costs import CollectiveCost
from poplar.planner.cost_model import StageCosts
from poplar.programmes.graph.graph import TensorType
from poplar.programmes.graph.placement import Placement, Sharded
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.step_terms import (
    StepTerms,
    Transfer,
    divided_units,
    parts_of,
    transfers_of,
    work_of,
)

UNMEASURED_LATENCY_SECONDS = 1e-4
"""Latency in profiles without latencies: that of a small gloo all-to-all on one host."""


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """Seconds in which each rank computes a part of the whole batch."""

    fixed: tuple[float, ...]
    """Seconds of a pass, whatever the part."""
    whole: tuple[float, ...]
    """Seconds of all work, beyond `fixed`."""

    def slowest(self, parts: Sequence[float]) -> float:
        """Seconds of the slowest rank, if each computes its part of all work."""
        return max(
            fixed + part * whole
            for fixed, part, whole in zip(self.fixed, parts, self.whole, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Links:
    """The links of the ranks in one collective."""

    send: tuple[float, ...]
    """Seconds per byte, by rank."""
    receive: tuple[float, ...]
    latency: float

    def busiest(self, sent: Sequence[float], received: Sequence[float]) -> float:
        """Seconds per byte of a tensor of which ranks send and receive parts, without latency."""
        out = max(part * rate for part, rate in zip(sent, self.send, strict=True))
        into = max(part * rate for part, rate in zip(received, self.receive, strict=True))
        return max(out, into)


def measured_links(costs: StageCosts) -> tuple[Links, Links]:
    """The links in reductions, with packing and summation, and in other collectives.

    Behind a hierarchical transport, or where rates were not measured, all ranks have the rate of
    the collective.
    """
    model, numel = costs.cluster.model, float(costs.cluster.model.numel)
    latencies = costs.cluster.network.collective_latency_seconds
    reducing, moving = latencies or (UNMEASURED_LATENCY_SECONDS,) * 2
    reduce, gather = costs.collectives.reduce_scatter, costs.collectives.all_gather
    sent, received = _rates(reduce, numel * (model.wire_bytes or 4.0))
    # In lines of an all-gather, the first rate is that of receiving.
    into, out = _rates(gather, numel * (model.param_bytes or 4.0))
    return Links(sent, received, reducing), Links(out, into, moving)


def _rates(cost: CollectiveCost, nbytes: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    ranks, pairs = len(cost.levels[0]), cost.link_seconds
    if pairs is None:
        even = (1.0 / ranks,) * ranks
        whole = cost.seconds(even) * ranks / (ranks - 1) if ranks > 1 else 0.0
        pairs = [(whole, whole)] * ranks
    scale = cost.bandwidth_part / nbytes
    first, second = zip(*pairs, strict=True)
    return tuple(scale * rate for rate in first), tuple(scale * rate for rate in second)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCosts:
    """What programmes with some ratios cost."""

    ratios: tuple[int, ...]
    compute: RankSeconds
    work: float
    """Work of the whole graph."""
    reducing: Links
    moving: Links
    """Links in all collectives but reductions."""
    element_seconds: float = 0.0
    """Seconds of the gradient and the update of an element that every rank has."""

    def node_seconds(self, pattern: Pattern, strategy: Strategy, *, trained: bool) -> float:
        """Seconds of a node at the slowest rank, with its backward pass if it is `trained`."""
        units, work = divided_units(pattern, strategy), work_of(pattern, trained=trained)
        return self.compute_seconds({units: work})

    def move_seconds(
        self, kind: TensorType, source: Placement, target: Placement, *, trained: bool
    ) -> float:
        """Seconds of a collective, and of its adjoint if the tensor has a gradient (`trained`)."""
        moved = transfers_of(kind, source, target, trained=trained)
        return math.fsum(self.collective_seconds({one: kind.nbytes}, {one: 1}) for one in moved)

    def gradient_seconds(self, kind: TensorType, placement: Placement) -> float:
        """Seconds of a parameter's gradient and update."""
        return 0.0 if isinstance(placement, Sharded) else self.element_seconds * kind.numel

    def compute_seconds(self, work: Mapping[int, float]) -> float:
        """Seconds of work by number of units, each part at its slowest rank."""
        return math.fsum(
            self.compute.slowest(parts_of(units, self.ratios)) * own / self.work
            for units, own in work.items()
        )

    def collective_seconds(
        self, nbytes: Mapping[Transfer, float], calls: Mapping[Transfer, int]
    ) -> float:
        """Seconds of collectives, by their bytes and their numbers."""
        if len(self.ratios) == 1:
            return 0.0
        latencies = (count * self._links(one).latency for one, count in calls.items())
        moved = (count * self._byte_seconds(one) for one, count in nbytes.items())
        return math.fsum((*latencies, *moved))

    def programme_seconds(self, terms: StepTerms) -> float:
        """Seconds of all parts of a programme."""
        moved = self.collective_seconds(terms.transfers, terms.calls)
        gradients = self.element_seconds * terms.replicated
        return self.compute_seconds(terms.work) + moved + gradients

    def _links(self, transfer: Transfer) -> Links:
        return self.reducing if transfer.kind == "reduce" else self.moving

    def _byte_seconds(self, transfer: Transfer) -> float:
        """Seconds for each byte of a whole tensor, without latency."""
        before, after = (parts_of(transfer.units[at], self.ratios) for at in (0, -1))
        if transfer.kind == "exchange":
            once = [(a * (1.0 - b), b * (1.0 - a)) for a, b in zip(before, after, strict=True)]
            return self.moving.busiest(*zip(*once, strict=True))
        others = [1.0 - part for part in before]
        each = [(len(before) - 1) * part for part in before]
        sent, received = (others, each) if transfer.kind == "reduce" else (each, others)
        return self._links(transfer).busiest(sent, received)
