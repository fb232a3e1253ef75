"""Makes a programme of strategies: the collectives between the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph
from poplar.programmes.graph.placement import REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Collective, Programme
from poplar.programmes.rules.strategy import Strategy


def composed(
    graph: Graph,
    ratios: Sequence[int],
    leaves: Mapping[str, Placement],
    strategies: Mapping[str, Strategy],
) -> Programme:
    """The programme with these strategies.

    Args:
        graph: whose nodes are placed.
        ratios: of the programme.
        leaves: placement of each leaf, by node.
        strategies: of every other node.

    Raises:
        ValueError: a list of tensors would have to change its placement, or values would have to
            become partial.
    """
    placements = {
        name: leaves[name] if node.operator in LEAVES else strategies[name].output
        for name, node in graph.nodes.items()
    }
    collectives: dict[Collective, None] = {}
    for reader, strategy in strategies.items():
        for name, target in zip(graph.nodes[reader].inputs, strategy.inputs, strict=True):
            if target is None or target == placements[name]:
                continue
            if graph.nodes[name].returns_list:
                raise ValueError(f"{name}, a list, is {placements[name]}, and is read as {target}")
            collectives[Collective(name, placements[name], target)] = None
    return Programme(
        ratios=tuple(ratios),
        placements=placements,
        parameters={
            node.source: placements[name]
            for name, node in graph.nodes.items()
            if node.operator == PARAMETER
        },
        collectives=tuple(collectives),
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
