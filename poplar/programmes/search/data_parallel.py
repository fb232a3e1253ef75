"""The programme of data parallelism: the batch is sharded, parameters are replicated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from poplar.programmes.graph.graph import LEAVES, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy, divided, strategies
from poplar.programmes.search.composition import batch_placements, composed

_NONE: Mapping[str, Placement] = MappingProxyType({})


def data_parallel(
    graph: Graph, ratios: Sequence[int], parameters: Mapping[str, Placement] = _NONE
) -> Programme:
    """Every operator is divided by samples; where it mixes them, all ranks compute all of it.

    Args:
        graph: of a loss.
        ratios: parts of the ranks in the batch.
        parameters: by name, placements of parameters that are gathered before they are read; others
            are replicated.
    """
    leaves: dict[str, Placement] = {
        name: REPLICATED for name, node in graph.nodes.items() if node.operator in LEAVES
    }
    leaves |= batch_placements(graph)
    placements = dict(leaves)
    chosen: dict[str, Strategy] = {}
    for name, node in graph.nodes.items():
        if node.operator not in LEAVES:
            chosen[name] = _following(node, pattern_of(graph, node), placements)
            placements[name] = chosen[name].output
    leaves |= {
        node.name: parameters[name] for name, node in graph.parameters.items() if name in parameters
    }
    return composed(graph, ratios, leaves, chosen)


def _following(node: Node, pattern: Pattern, placements: Mapping[str, Placement]) -> Strategy:
    """The strategy that takes the inputs as they are, or that of all ranks computing all."""
    read = {i: placements[name] for i, name in enumerate(node.inputs) if i not in pattern.unread}
    for index, placement in read.items():
        if isinstance(placement, Sharded):
            strategy = _along(pattern, index, placement)
            if strategy is not None:
                return strategy
    by_all, *others = strategies(pattern, lambda axis: ())
    partial = {index for index, placement in read.items() if placement is PARTIAL}
    for other in others:  # linear in some inputs; what else is partial is added up before
        if {i for i, placement in enumerate(other.inputs) if placement is PARTIAL} <= partial:
            return other
    return by_all


def _along(pattern: Pattern, index: int, placement: Sharded) -> Strategy | None:
    """The strategy that reads an input in this placement."""
    dims = pattern.inputs[index]
    inner = pattern.inner_size(dims, placement.dim)
    axis = dims[placement.dim][:1]
    if not axis or axis[0] not in pattern.divisible_axes() or placement.unit % inner:
        return None
    return divided(pattern, axis[0], placement.unit // inner)
