"""What the search may choose from: the strategies of each node of a graph.

Everything here is independent of costs. Large models are searched with these restrictions:

- only dimensions of samples and of large parameters are cut, with what they become in other tensors
  (`_useful_dims`): not tokens, for example, which are cut with no less communication than samples;
- of several units, the largest one is used: heads are not cut where channels could be;
- products are not computed by all ranks from partial values, and what depends neither on the batch
  nor on parameters is computed by all ranks;
- operators that compute little and return no more bytes than they read move none of their inputs if
  they can read all of them where they are (`followers`): their output is moved instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from poplar.programmes.graph.graph import INPUT, LEAVES, PARAMETER, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, Placement, Sharded
from poplar.programmes.rules.pattern import Dims, Pattern
from poplar.programmes.rules.registry import pattern_of, strategies_of
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.composition import batch_placements

_LARGE = 0.005
"""Fraction of the model's parameters from which on their dimensions are cut."""
_Dim = tuple[str, int]
"""A dimension of a node's output."""
AxisUnits = dict[str, dict[str, set[int]]]
"""The units to consider for each node and axis."""


@dataclass(frozen=True)
class SearchSpace:
    """The nodes of a graph in order, with their strategies."""

    graph: Graph
    nodes: tuple[Node, ...]
    """Without leaves."""
    strategies: Mapping[str, tuple[Strategy, ...]]
    batch: Mapping[str, Placement]
    """Placements of the batch's tensors."""
    trained: frozenset[str]
    """Nodes that depend on a trained parameter, and so have a backward pass."""
    followers: frozenset[str]
    """Nodes that move no inputs if they can read them where they are."""

    @classmethod
    def of(cls, graph: Graph, *, restricted: bool = False) -> SearchSpace:
        """The space of a graph.

        Args:
            restricted: leave out the strategies that the module's docstring names.
        """
        nodes = tuple(n for n in graph.nodes.values() if n.operator not in LEAVES)
        units = axis_units(graph)
        useful = _useful_axes(graph) if restricted else None
        given = graph.depending(lambda node: node.operator in (INPUT, PARAMETER))
        depends = given if restricted else units.keys()

        def chosen(node: Node) -> Iterator[Strategy]:
            own = units[node.name]
            for strategy in strategies_of(
                graph, node, lambda axis: [max(own[axis])] if useful else sorted(own[axis])
            ):
                if useful is None or _is_useful(graph, node, strategy, useful[node.name]):
                    yield strategy
                if node.name not in depends:
                    return

        return cls(
            graph=graph,
            nodes=nodes,
            strategies={node.name: tuple(dict.fromkeys(chosen(node))) for node in nodes},
            batch=batch_placements(graph),
            trained=graph.depending(lambda node: node.is_trained),
            followers=frozenset(n.name for n in nodes if restricted and _is_follower(graph, n)),
        )


def _is_useful(graph: Graph, node: Node, strategy: Strategy, axes: frozenset[str]) -> bool:
    if strategy.axis:
        return strategy.axis in axes
    return PARTIAL not in strategy.inputs or _is_light(graph, node)


def _is_light(graph: Graph, node: Node) -> bool:
    """Whether a node computes no more than one operation for each element that it reads."""
    largest = max(kind.numel for kind in (*graph.types(node), node.output))
    return pattern_of(graph, node).flops <= largest


def _is_follower(graph: Graph, node: Node) -> bool:
    read = sum(kind.nbytes for kind in graph.types(node))
    return _is_light(graph, node) and sum(kind.nbytes for kind in node.outputs) <= read


def _useful_axes(graph: Graph) -> dict[str, frozenset[str]]:
    """The axes of each node that are dimensions of samples or of large parameters."""
    groups, patterns = _Groups(), _patterns(graph)
    axes: dict[str, dict[str, list[_Dim]]] = {}
    for name, pattern in patterns.items():
        own = axes.setdefault(name, {})
        tensors = (*graph.nodes[name].inputs, name)
        for tensor, dims in zip(tensors, (*pattern.inputs, pattern.output), strict=True):
            for dim, axes_of_dim in enumerate(dims):
                if axes_of_dim:
                    own.setdefault(axes_of_dim[0], []).append((tensor, dim))
        for axis in pattern.divisible_axes():
            for other in own.get(axis, [])[1:]:
                groups.join(own[axis][0], other)
    seeds = {
        groups.find((name, placement.dim))
        for name, placement in batch_placements(graph).items()
        if isinstance(placement, Sharded)
    }
    numels: dict[_Dim, int] = {}
    for node in graph.parameters.values():
        for group in {groups.find((node.name, dim)) for dim in range(len(node.output.shape))}:
            numels[group] = numels.get(group, 0) + node.output.numel
    total = sum(node.output.numel for node in graph.parameters.values())
    seeds |= {group for group, numel in numels.items() if numel >= _LARGE * total}
    return {
        name: frozenset(
            axis
            for axis in patterns[name].divisible_axes()
            if any(groups.find(dim) in seeds for dim in own.get(axis, []))
        )
        for name, own in axes.items()
    }


class _Groups:
    """Disjoint sets of dimensions that are cut together."""

    def __init__(self) -> None:
        self._parents: dict[_Dim, _Dim] = {}

    def find(self, dim: _Dim) -> _Dim:
        """The representative of a dimension's set."""
        while (parent := self._parents.get(dim, dim)) != dim:
            dim = parent
        return dim

    def join(self, one: _Dim, other: _Dim) -> None:
        """Join the sets of two dimensions."""
        one, other = self.find(one), self.find(other)
        if one != other:
            self._parents[other] = one


def _patterns(graph: Graph) -> dict[str, Pattern]:
    """Of the nodes that are no leaves."""
    nodes = graph.nodes.items()
    return {name: pattern_of(graph, node) for name, node in nodes if node.operator not in LEAVES}


def axis_units(graph: Graph) -> AxisUnits:
    """Units with which an operator's axis is cut as an operator before or after it needs.

    A linear layer before attention has the units 1 and the channels of a head, because `view` in
    between makes heads of its columns.
    """
    patterns = _patterns(graph)
    units: AxisUnits = {
        name: {axis: {1} for axis in pattern.divisible_axes()} for name, pattern in patterns.items()
    }
    has_changed = True
    while has_changed:
        has_changed = False
        for name, pattern in patterns.items():
            for source, dims in zip(graph.nodes[name].inputs, pattern.inputs, strict=True):
                if graph.nodes[source].operator not in LEAVES:
                    before = (patterns[source], patterns[source].output, units[source])
                    after = (pattern, dims, units[name])
                    has_changed |= _exchange(before, after) | _exchange(after, before)
    return units


_Side = tuple[Pattern, Dims, dict[str, set[int]]]


def _exchange(giver: _Side, taker: _Side) -> bool:
    """Let one operator consider the units of another one that has the same tensor."""
    has_changed = False
    for dim, axes in enumerate(giver[1]):
        other = taker[1][dim][:1]
        if not axes or axes[0] not in giver[2] or not other or other[0] not in taker[2]:
            continue
        given_inner = giver[0].inner_size(giver[1], dim)
        taken_inner = taker[0].inner_size(taker[1], dim)
        size, known = taker[0].sizes[other[0]], taker[2][other[0]]
        for unit in sorted(giver[2][axes[0]]):
            taken, rest = divmod(unit * given_inner, taken_inner)
            if rest == 0 and taken and size % taken == 0 and taken not in known:
                known.add(taken)
                has_changed = True
    return has_changed
