"""The rule of each operator, and what every rank calls for a node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from poplar.programmes.graph.graph import LEAVES, Graph, Node, Reference, TensorType
from poplar.programmes.graph.placement import REPLICATED, Placement, cut, local_shape
from poplar.programmes.rules.dimensions import DIMENSIONS
from poplar.programmes.rules.local_call import ZEROS, Part, Rule
from poplar.programmes.rules.pattern import Pattern, computed_by_all
from poplar.programmes.rules.pointwise import POINTWISE
from poplar.programmes.rules.products import PRODUCTS
from poplar.programmes.rules.strategy import Strategy, strategies, strategy_of

COMPUTED_BY_ALL = Rule(computed_by_all)
"""The rule of operators that are not in `RULES`."""
RULES = {
    name: rule
    for names, rule in (POINTWISE | DIMENSIONS | PRODUCTS).items()
    for name in names.split()
}
"""Rules by the base name of the operator, such as `linear` of `aten.linear.default`."""


def base_name(operator: str) -> str:
    """`linear` of `aten.linear.default`, unless `RULES` has the overload or another namespace."""
    namespace, _, name = operator.partition(".")
    return operator if namespace != "aten" else name if name in RULES else name.partition(".")[0]


def rule_of(node: Node) -> Rule:
    """The rule of a node's operator; `COMPUTED_BY_ALL` if there is none, or it does not fit."""
    if node.misfit:
        return COMPUTED_BY_ALL
    return RULES.get(base_name(node.operator), COMPUTED_BY_ALL)


def pattern_of(graph: Graph, node: Node) -> Pattern:
    """The pattern of a node that is no leaf."""
    if node.name not in graph.derived:
        graph.derived[node.name] = _new_pattern(graph, node)
    pattern: Pattern = graph.derived[node.name]
    return pattern


def _new_pattern(graph: Graph, node: Node) -> Pattern:
    """The pattern of an operator, with partial values only of types that can be added up."""
    types = graph.types(node)
    pattern = rule_of(node).pattern(node, types)
    linear_in = tuple(
        part
        for part in pattern.linear_in
        if all(_keeps_sums(types[index], output) for index in part for output in node.outputs)
    )
    has_sum = all(output.has_sum for output in node.outputs)
    whole = pattern.whole if has_sum else pattern.whole | pattern.summed
    return replace(pattern, linear_in=linear_in, whole=whole)


def _keeps_sums(read: TensorType, computed: TensorType) -> bool:
    """Whether summands can be converted one by one: neither to truth values nor by rounding."""
    integers = ("int", "uint")
    is_rounded = computed.dtype.startswith(integers) and not read.dtype.startswith(integers)
    return read.has_sum and computed.has_sum and not is_rounded


def strategies_of(
    graph: Graph, node: Node, units: Callable[[str], Iterable[int]] = lambda axis: (1,)
) -> Iterator[Strategy]:
    """All strategies of a node that is no leaf; a tensor that it reads twice has one placement.

    Args:
        units: which units to consider for an axis, as in `strategies`.
    """
    for strategy in strategies(pattern_of(graph, node), units):
        pairs = set(zip(node.inputs, strategy.inputs, strict=True))
        if len(pairs) == len(set(node.inputs)):
            yield strategy


def local_call(
    graph: Graph,
    node: Node,
    inputs: Sequence[Placement],
    output: Placement,
    ratios: Sequence[int],
    rank: int,
) -> Node:
    """What a rank calls for its part of a node; `ZEROS` if the part is empty.

    Args:
        inputs: placements in which the node's tensors are read, as in `Programme.inputs`.
        output: placement of the node's output, as in `Programme.placements`.

    Raises:
        ValueError: the operator cannot be computed with these placements.
    """
    pattern = pattern_of(graph, node)
    try:
        strategy = strategy_of(pattern, inputs, output)
    except ValueError as error:
        raise ValueError(f"node {node.name!r}, {node.operator}: {error}") from None
    size = pattern.sizes.get(strategy.axis, 0)
    start, stop = cut(size, ratios, strategy.unit)[rank : rank + 2]
    call = replace(
        node,
        outputs=tuple(
            replace(kind, shape=local_shape(output, kind.shape, ratios, rank))
            for kind in node.outputs
        ),
    )
    if strategy.axis and start == stop:
        arguments = tuple(Reference(name) for name in node.inputs)
        return replace(call, operator=ZEROS, arguments=arguments, keywords={})
    part = Part(
        node=node,
        types=graph.types(node),
        is_summed=strategy.axis in pattern.summed,
        start=start,
        stop=stop,
        size=size,
    )
    return rule_of(node).localize(call, part)


def whole_call(graph: Graph, node: Node) -> Node:
    """What one process calls for a node."""
    return local_call(graph, node, (REPLICATED,) * len(node.inputs), REPLICATED, (1,), 0)


def without_rules(graph: Graph) -> Iterator[Node]:
    """Nodes that every rank computes whole, because no rule fits them."""
    for node in graph.nodes.values():
        if node.operator not in LEAVES and rule_of(node) is COMPUTED_BY_ALL:
            yield node
