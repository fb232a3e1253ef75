"""Predicted seconds of a programme: each node at the slowest rank, collectives by their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph, TensorType
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy, strategy_of

_WITH_BACKWARD = 3.0
"""FLOPs of forward and backward, relative to forward: a product has two gradients."""


class ProgrammeCosts(Protocol):
    """Seconds of the parts of a programme, which are added up."""

    @property
    def ratios(self) -> tuple[int, ...]:
        """Of the programme."""

    def compute_seconds(self, pattern: Pattern, strategy: Strategy, *, trained: bool) -> float:
        """Of a node at the slowest rank."""

    def move_seconds(
        self, kind: TensorType, source: Placement, target: Placement, *, trained: bool
    ) -> float:
        """Of a collective, and of its adjoint in the backward pass."""

    def gradient_seconds(self, kind: TensorType, placement: Placement) -> float:
        """Of a parameter's gradient and update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What ranks and their network can do."""

    ratios: tuple[int, ...]
    """Of the programme."""
    flops_per_second: tuple[float, ...]
    """Of each rank."""
    bytes_per_second: float
    """That each rank sends while it receives as many."""
    latency_seconds: float = 0.0
    """Of a collective."""

    def __post_init__(self) -> None:
        if len(self.ratios) != len(self.flops_per_second):
            raise ValueError(
                f"Costs: ratios and flops_per_second must have one entry per rank, got "
                f"{len(self.ratios)} and {len(self.flops_per_second)}"
            )
        if min(*self.flops_per_second, self.bytes_per_second) <= 0 or self.latency_seconds < 0:
            raise ValueError("Costs: speeds must be above 0 and the latency at least 0")

    def compute_seconds(self, pattern: Pattern, strategy: Strategy, *, trained: bool) -> float:
        """Of a node at the slowest rank.

        Args:
            pattern: of the node.
            strategy: of the node.
            trained: the node has a backward pass.
        """
        flops = pattern.flops * (_WITH_BACKWARD if trained else 1.0)
        return max(
            strategy.flops_share(pattern, self.ratios, rank) * flops / speed
            for rank, speed in enumerate(self.flops_per_second)
        )

    def move_seconds(
        self, kind: TensorType, source: Placement, target: Placement, *, trained: bool
    ) -> float:
        """Of a collective, and of its adjoint in the backward pass.

        Args:
            kind: of the tensor.
            source: the placement that the tensor has.
            target: the placement that it gets.
            trained: the tensor has a gradient.
        """
        ranks = len(self.ratios)
        if ranks == 1 or source is REPLICATED:  # slices, and zeros around their gradients
            return 0.0
        moved = self._moved_fraction(kind, source, target) * kind.nbytes
        seconds = self.latency_seconds + moved / self.bytes_per_second
        return 2.0 * seconds if trained and kind.is_floating else seconds

    def _moved_fraction(self, kind: TensorType, source: Placement, target: Placement) -> float:
        """Bytes that the busiest rank sends or receives, relative to those of the tensor."""
        if source is PARTIAL and target is REPLICATED:  # reduce-scatter and all-gather
            return 2.0 * (1.0 - 1.0 / len(self.ratios))
        own = [self._parts(kind, p) for p in (source, target) if isinstance(p, Sharded)]
        if len(own) == 1:
            return 1.0 - min(own[0])
        before, after = own
        sent = max(a * (1.0 - b) for a, b in zip(before, after, strict=True))
        received = max(b * (1.0 - a) for a, b in zip(before, after, strict=True))
        return max(sent, received)

    def _parts(self, kind: TensorType, placement: Sharded) -> list[float]:
        bounds = placement.bounds(kind.shape, self.ratios)
        size = max(1, bounds[-1])
        return [(bounds[rank + 1] - bounds[rank]) / size for rank in range(len(self.ratios))]

    def gradient_seconds(self, kind: TensorType, placement: Placement) -> float:
        """Of adding up a parameter's gradient over ranks and of giving all ranks the update.

        Without latency: gradients of many parameters are moved together.
        """
        if isinstance(placement, Sharded):
            return 0.0
        return 2.0 * (1.0 - 1.0 / len(self.ratios)) * kind.nbytes / self.bytes_per_second


def trained_nodes(graph: Graph) -> frozenset[str]:
    """Nodes that depend on a parameter, and so have a backward pass."""
    trained: set[str] = set()
    for name, node in graph.nodes.items():
        if node.operator == PARAMETER or trained.intersection(node.inputs):
            trained.add(name)
    return frozenset(trained)


def programme_seconds(graph: Graph, programme: Programme, costs: ProgrammeCosts) -> float:
    """Predicted seconds of one forward and backward pass.

    Args:
        graph: that the programme places.
        programme: with the ratios of `costs`.
        costs: of the ranks.
    """
    trained = trained_nodes(graph)
    seconds = 0.0
    for name, node in graph.nodes.items():
        if node.operator == PARAMETER:
            seconds += costs.gradient_seconds(node.output, programme.placements[name])
        elif node.operator not in LEAVES:
            pattern = pattern_of(graph, node)
            strategy = strategy_of(pattern, programme.inputs[name], programme.placements[name])
            seconds += costs.compute_seconds(pattern, strategy, trained=name in trained)
    for moved in programme.collectives:
        kind = graph.nodes[moved.node].output
        is_trained = moved.node in trained
        seconds += costs.move_seconds(kind, moved.source, moved.target, trained=is_trained)
    return seconds
