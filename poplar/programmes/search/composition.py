"""Makes a programme of strategies, and that of data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poplar.programmes.graph.graph import LEAVES, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy, along, strategies


def composed(
    graph: Graph,
    ratios: Sequence[int],
    leaves: Mapping[str, Placement],
    strategies: Mapping[str, Strategy],
) -> Programme:
    """The programme with these strategies."""
    placements = {
        name: leaves[name] if node.operator in LEAVES else strategies[name].output
        for name, node in graph.nodes.items()
    }
    return Programme(
        ratios=tuple(ratios),
        placements=placements,
        inputs={name: strategy.inputs for name, strategy in strategies.items()},
    )


def batch_placements(graph: Graph) -> dict[str, Placement]:
    """The placements of the batch's tensors, by node: ranks have consecutive samples.

    The first dimension of the first tensor gives the number of samples. Tensors with another first
    dimension are replicated.
    """
    batch = graph.batch.values()
    samples = next((node.output.shape[0] for node in batch if node.output.shape), None)
    return {
        node.name: Sharded(0) if node.output.shape[:1] == (samples,) else REPLICATED
        for node in batch
    }


def leaf_placements(graph: Graph) -> dict[str, Placement]:
    """The placements of leaves under data parallelism."""
    leaves = [name for name, node in graph.nodes.items() if node.operator in LEAVES]
    return dict.fromkeys(leaves, REPLICATED) | batch_placements(graph)


def data_parallel(graph: Graph, ratios: Sequence[int]) -> Programme:
    """Every operator is divided by samples; where it mixes them, all ranks compute all of it."""
    leaves = leaf_placements(graph)
    placements = dict(leaves)
    chosen: dict[str, Strategy] = {}
    for name, node in graph.nodes.items():
        if node.operator not in LEAVES:
            chosen[name] = _following(node, pattern_of(graph, node), placements)
            placements[name] = chosen[name].output
    return composed(graph, ratios, leaves, chosen)


def _following(node: Node, pattern: Pattern, placements: Mapping[str, Placement]) -> Strategy:
    """The strategy that takes the inputs as they are, or that of all ranks computing all."""
    read = [placements[name] for name in node.inputs]
    for index, placement in enumerate(read):
        if isinstance(placement, Sharded):
            strategy = along(pattern, pattern.inputs[index], placement)
            if strategy is not None:
                return strategy
    by_all, *others = strategies(pattern, lambda axis: ())
    partial = {index for index, placement in enumerate(read) if placement is PARTIAL}
    for other in others:  # linear in some inputs; what else is partial is added up before
        if {i for i, placement in enumerate(other.inputs) if placement is PARTIAL} <= partial:
            return other
    return by_all
