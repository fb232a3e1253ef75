"""Programmes for tests: strategies of nodes are drawn, or follow from the placements of leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from poplar.programmes.graph.graph import LEAVES, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy, strategies

Choose = Callable[[Node, list[Strategy], Sequence[Placement]], Strategy]
"""From a node, its strategies and where its inputs are."""
SLICE, TRANSFER = 1, 10
"""Costs of a conversion without and with communication, relative to each other."""


def programme_of(
    graph: Graph, ratios: Sequence[int], leaves: Mapping[str, Placement], choose: Choose
) -> Programme:
    """The programme of the chosen strategies.

    Args:
        leaves: by node; others are replicated.
    """
    placements: dict[str, Placement] = {}
    inputs: dict[str, tuple[Placement | None, ...]] = {}
    for name, node in graph.nodes.items():
        if node.operator in LEAVES:
            placements[name] = leaves.get(name, REPLICATED)
            continue
        sources = [placements[source] for source in node.inputs]
        possible = [
            strategy
            for strategy in strategies(pattern_of(graph, node), lambda axis, s=sources: units(s))
            if all(
                target is not PARTIAL or source is PARTIAL
                for source, target in zip(sources, strategy.inputs, strict=True)
            )
        ]
        strategy = choose(node, possible, sources)
        placements[name], inputs[name] = strategy.output, strategy.inputs
    return Programme(
        ratios=tuple(ratios),
        placements=placements,
        inputs=inputs,
    )


def units(sources: Sequence[Placement]) -> list[int]:
    """Those that the inputs have, and a few others."""
    given = [source.unit for source in sources if isinstance(source, Sharded)]
    return [n for n in range(1, max([4, *given]) + 1) if n < 5 or any(u % n == 0 for u in given)]


def nearest(node: Node, possible: list[Strategy], sources: Sequence[Placement]) -> Strategy:
    """The strategy that moves the fewest inputs."""

    def cost(strategy: Strategy) -> int:
        return sum(
            0 if target in (None, source) else SLICE if source is REPLICATED else TRANSFER
            for source, target in zip(sources, strategy.inputs, strict=True)
        )

    return min(possible, key=cost)


def random_programme(graph: Graph, ratios: Sequence[int], draw: random.Random) -> Programme:
    """Any placement of the leaves, any strategy of each node."""

    def choose(node: Node, possible: list[Strategy], sources: Sequence[Placement]) -> Strategy:
        divided = [strategy for strategy in possible if strategy.output is not REPLICATED]
        return draw.choice(divided if divided and draw.random() < 0.9 else possible)

    leaves = {
        name: draw.choice([REPLICATED, *(Sharded(dim) for dim in range(len(node.output.shape)))])
        for name, node in graph.nodes.items()
        if node.operator in LEAVES
    }
    return programme_of(graph, ratios, leaves, choose)


def following(
    graph: Graph, ratios: Sequence[int], parameters: Mapping[str, Placement]
) -> Programme:
    """Each operator is computed where its inputs are; the batch is replicated."""
    leaves = {graph.parameters[name].name: placement for name, placement in parameters.items()}
    return programme_of(graph, ratios, leaves, nearest)
