"""Mean losses of classes as a sum and a count, so that each rank can add up its own samples.

The mean of `cross_entropy_loss` is over the targets that it does not ignore, on all ranks, so it is
not a weighted mean of the ranks' means with weights that are known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator

from poplar.programmes.graph.graph import Graph, Node, Reference, TensorType

_LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
_WEIGHT, _REDUCTION, _IGNORED = 2, 3, 4
"""Positions of the arguments, after the scores and the targets."""
_DEFAULTS = (None, 1, -100)
_MEAN, _SUM = 1, 2


def with_global_means(graph: Graph) -> Graph:
    """The same function with these losses as sums, divided by the number of counted targets.

    Losses with class weights or with probabilities as targets are left as they are.
    """
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        replaced = _divided(graph, node) if node.operator in _LOSSES else (node,)
        nodes.update((new.name, new) for new in replaced)
    return Graph(nodes, graph.output)


def _divided(graph: Graph, node: Node) -> Iterator[Node]:
    given = (*node.arguments, *_DEFAULTS[max(0, len(node.arguments) - _WEIGHT) :])
    target = graph.nodes[given[1].node]
    is_plain = given[_WEIGHT] is None and not target.output.is_floating
    if given[_REDUCTION] != _MEAN or not is_plain or node.keywords:
        yield node
        return
    total = Node(
        name=f"{node.name}_sum",
        operator=node.operator,
        arguments=(*given[:_REDUCTION], _SUM, *given[_IGNORED:]),
        outputs=node.outputs,
    )
    counted = Node(
        name=f"{node.name}_counted",
        operator="aten.ne.Scalar",
        arguments=(given[1], given[_IGNORED]),
        outputs=(TensorType(target.output.shape, "bool", 1),),
    )
    count = Node(
        name=f"{node.name}_count",
        operator="aten.sum.default",
        arguments=(Reference(counted.name),),
        outputs=(TensorType((), "int64", 8),),
    )
    quotient = Node(
        name=node.name,
        operator="aten.div.Tensor",
        arguments=(Reference(total.name), Reference(count.name)),
        outputs=node.outputs,
    )
    yield from (total, counted, count, quotient)
