"""Seconds of the parts of a programme on a measured cluster: nodes, collectives, gradients.

The search adds them up node by node; a whole programme has them as sums (`StepTerms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poplar.programmes.graph.graph import TensorType
from poplar.programmes.graph.placement import Placement, Sharded
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.links import ActivationLinks
from poplar.programmes.search.step_terms import (
    StepTerms,
    Transfer,
    divided_units,
    parts_of,
    transfers_of,
    work_of,
)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCosts:
    """What programmes with some ratios cost."""

    ratios: tuple[int, ...]
    compute: RankSeconds
    work: float
    """Work of the whole graph."""
    links: ActivationLinks
    element_seconds: float = 0.0
    """Seconds of the gradient and the update of an element that every rank has."""

    def node_seconds(self, pattern: Pattern, strategy: Strategy, *, trained: bool) -> float:
        """Seconds of a node at the slowest rank.

        Args:
            pattern: of the node.
            strategy: of the node.
            trained: the node has a backward pass.
        """
        parts = parts_of(divided_units(pattern, strategy), self.ratios)
        return self.compute.slowest(parts) * work_of(pattern, trained=trained) / self.work

    def move_seconds(
        self, kind: TensorType, source: Placement, target: Placement, *, trained: bool
    ) -> float:
        """Seconds of a collective, and of its adjoint in the backward pass.

        Args:
            kind: of the tensor.
            source: the placement that the tensor has.
            target: the placement that it gets.
            trained: the tensor has a gradient.
        """
        if len(self.ratios) == 1:
            return 0.0
        return math.fsum(
            self._latency(transfer.kind) + self._transfer_seconds(transfer, kind.nbytes)
            for transfer in transfers_of(kind, source, target, trained=trained)
        )

    def gradient_seconds(self, kind: TensorType, placement: Placement) -> float:
        """Seconds of a parameter's gradient and update."""
        return 0.0 if isinstance(placement, Sharded) else self.element_seconds * kind.numel

    def compute_seconds(self, terms: StepTerms) -> float:
        """Seconds of all nodes, each at its slowest rank."""
        return math.fsum(
            self.compute.slowest(parts_of(units, self.ratios)) * work / self.work
            for units, work in terms.work.items()
        )

    def collective_seconds(self, terms: StepTerms) -> float:
        """Seconds of all collectives."""
        if len(self.ratios) == 1:
            return 0.0
        latencies = math.fsum(count * self._latency(kind) for kind, count in terms.calls.items())
        return latencies + math.fsum(
            self._transfer_seconds(transfer, nbytes) for transfer, nbytes in terms.transfers.items()
        )

    def programme_seconds(self, terms: StepTerms) -> float:
        """Seconds of all parts of a programme."""
        gradients = self.element_seconds * terms.replicated
        return self.compute_seconds(terms) + self.collective_seconds(terms) + gradients

    def _latency(self, kind: str) -> float:
        return (self.links.reducing if kind == "reduce" else self.links.moving).latency

    def _transfer_seconds(self, transfer: Transfer, nbytes: float) -> float:
        """Seconds of so many bytes, without latency."""
        sides = [parts_of(units, self.ratios) for units in transfer.units]
        links = self.links
        if transfer.kind == "exchange":
            return nbytes * links.all_to_all(*sides)
        rate = links.all_gather if transfer.kind == "gather" else links.reduce_scatter
        return nbytes * rate(*sides)
