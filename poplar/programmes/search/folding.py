"""Folding: repeated blocks of a model are planned once.

A block is a run of nodes with the same operators, shapes and attributes as the run before it. It
reads its own parameters, which have equal shapes in all repetitions, what the repetition before it
computed, and tensors from before all of them. All repetitions get the strategies of the first one,
which leaves out programmes that place equal blocks differently. What a block hands on may be placed
in another way than what the first one was given (`FoldedGraph.carried`): collectives between blocks
are counted for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from poplar.programmes.graph.graph import LEAVES, Graph, Node, Reference

_SMALLEST_GAIN = 4
"""Nodes that a fold leaves out, at least."""
_KEPT_APART = 2
"""Nodes of a block, at least: single nodes that follow each other are no blocks."""


@dataclass(frozen=True, slots=True)
class FoldedGraph:
    """A graph with each block once."""

    graph: Graph
    repetitions: Mapping[str, tuple[str, ...]]
    """The names in the whole graph of the nodes that a node stands for, leaves included, its
    own first."""
    carried: Mapping[str, str]
    """What the first repetition reads in place of a node that repetitions hand on. All its
    readers in the block are before the node."""

    def times(self, name: str) -> int:
        """How many nodes of the whole graph a node stands for."""
        return len(self.repetitions.get(name, (name,)))

    def members(self, name: str) -> tuple[str, ...]:
        """The nodes of the whole graph that a node stands for."""
        return self.repetitions.get(name, (name,))


class _Run(NamedTuple):
    """`times` repetitions of `length` nodes, of which the first is node number `first`."""

    first: int
    length: int
    times: int

    @property
    def saved(self) -> int:
        return self.length * (self.times - 1)


_Alike: TypeAlias = tuple[dict[str, list[str]], dict[str, str]]
"""Leaves of the first repetition with those of all, and `carried`."""


def unfolded(graph: Graph) -> FoldedGraph:
    """The graph itself."""
    return FoldedGraph(graph, {}, {})


def folded(graph: Graph, smallest_gain: int = _SMALLEST_GAIN) -> FoldedGraph:
    """The graph with repeated blocks once, those that save most nodes first.

    Args:
        graph: of a loss.
        smallest_gain: nodes that a fold must leave out.
    """
    result = unfolded(graph)
    while (found := _best_fold(result, smallest_gain)) is not None:
        result = found
    return result


def _best_fold(known: FoldedGraph, smallest_gain: int) -> FoldedGraph | None:
    graph = known.graph
    nodes = [node for node in graph.nodes.values() if node.operator not in LEAVES]
    runs = [run for run in _runs(graph, nodes, known) if run.saved >= smallest_gain]
    for run in sorted(runs, key=lambda run: (-run.saved, run.length, run.first)):
        alike = _alike(graph, nodes, run, known)
        if alike is not None:
            return _without_repetitions(known, nodes, run, *alike)
    return None


def _runs(graph: Graph, nodes: Sequence[Node], known: FoldedGraph) -> Iterator[_Run]:
    """Runs whose repetitions have the same operators, shapes and attributes; all their starts."""
    numbers: dict[Any, int] = {}
    kinds = [
        numbers.setdefault(_kind(graph, node, known.times(node.name)), len(numbers))
        for node in nodes
    ]
    for length in range(_KEPT_APART, len(nodes) // 2 + 1):
        begin = 0
        for at in range(len(nodes) - length + 1):
            if at < len(nodes) - length and kinds[at] == kinds[at + length]:
                continue
            equal = at - begin
            for first in range(begin, begin + length):
                count = (equal - (first - begin)) // length + 1
                if count < 2:
                    break
                yield _Run(first, length, count)
            begin = at + 1


def _kind(graph: Graph, node: Node, times: int) -> Any:
    """What is the same in all repetitions of a node; which nodes it reads is left out."""

    def shown(value: Any) -> Any:
        if isinstance(value, Reference):
            read = graph.nodes[value.node]
            is_leaf = read.operator in LEAVES
            return read.operator if is_leaf else "node", read.outputs
        if isinstance(value, list | tuple):
            return tuple(map(shown, value))
        return repr(value)

    keywords = tuple((key, shown(value)) for key, value in sorted(node.keywords.items()))
    return times, node.operator, node.outputs, shown(node.arguments), keywords, node.returns_list


def _alike(graph: Graph, nodes: Sequence[Node], run: _Run, known: FoldedGraph) -> _Alike | None:
    """What corresponds between repetitions; None if they read tensors in different ways."""
    first, length, count = run
    place = {node.name: first_at for first_at, node in enumerate(nodes)}
    end = first + length * count
    leaves: dict[str, list[str]] = {}
    carried: dict[str, str] = {}
    for at in range(first, first + length):
        members = [nodes[at + repetition * length] for repetition in range(count)]
        for reads in zip(*(node.inputs for node in members), strict=True):
            if graph.nodes[reads[0]].operator in LEAVES:
                if leaves.setdefault(reads[0], list(reads)) != list(reads):
                    return None
                continue
            places = [place[name] for name in reads]
            steps = {b - a for a, b in pairwise(places[1:])} or {length}
            if places[0] >= first and {places[1] - places[0], *steps} == {length}:
                continue  # of its own repetition
            if set(places) == {places[0]} and places[0] < first:
                continue  # the same tensor, from before all repetitions
            given = nodes[places[1]]  # by the repetition before
            is_handed_on = first <= places[1] < first + length and steps == {length}
            if not is_handed_on or places[0] >= first:
                return None
            if at > places[1] or carried.setdefault(given.name, reads[0]) != reads[0]:
                return None
    for own in leaves.values():
        if len(set(own)) not in (1, count) or any(known.times(name) > 1 for name in own):
            return None
    shared = {name for own in leaves.values() if len(set(own)) == 1 for name in own}
    separate = [name for own in leaves.values() if len(set(own)) > 1 for name in own]
    if shared.intersection(separate) or len(set(separate)) != len(separate):
        return None
    last = range(end - length, end)
    for reader in (*nodes[:first], *nodes[end:]):  # only the last repetition is read by others
        for name in reader.inputs:
            if first <= place.get(name, -1) < end and place[name] not in last:
                return None
            if name in separate:
                return None
    if first <= place[graph.output] < end or len(set(carried.values())) < len(carried):
        return None
    if set(carried).intersection(known.carried) or set(carried.values()).intersection(
        known.carried
    ):
        return None
    return {name: own for name, own in leaves.items() if len(set(own)) > 1}, carried


def _without_repetitions(
    known: FoldedGraph,
    nodes: Sequence[Node],
    run: _Run,
    leaves: Mapping[str, Sequence[str]],
    carried: Mapping[str, str],
) -> FoldedGraph:
    first, length, count = run
    groups = dict(leaves)
    for at in range(first, first + length):
        groups[nodes[at].name] = [nodes[at + r * length].name for r in range(count)]
    removed = {name: own for own, group in groups.items() for name in group[1:]}
    repetitions = dict(known.repetitions)
    for own, group in groups.items():
        repetitions[own] = tuple(m for name in group for m in known.members(name))
    for name in removed:
        repetitions.pop(name, None)
    kept = {
        name: _renamed(node, lambda read: removed.get(read, read))
        for name, node in known.graph.nodes.items()
        if name not in removed
    }
    before = {removed.get(a, a): removed.get(b, b) for a, b in known.carried.items()}
    graph = Graph(kept, known.graph.output)
    return FoldedGraph(graph, repetitions, {**before, **carried})


def _renamed(node: Node, name_of: Callable[[str], str]) -> Node:
    def renamed(value: Any) -> Any:
        if isinstance(value, Reference):
            return Reference(name_of(value.node))
        if isinstance(value, list | tuple):
            return type(value)(renamed(element) for element in value)
        return value

    keywords = {key: renamed(value) for key, value in node.keywords.items()}
    return replace(node, arguments=renamed(node.arguments), keywords=keywords)
