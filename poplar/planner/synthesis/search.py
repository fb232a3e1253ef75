"""The fastest programme of a graph, by A*: one node after another, in the graph's order.

A state says in which placements the tensors are that later nodes read. A parameter is placed by the
first node that reads it. The bound of what is left is the fastest strategy of each node without any
collective, so the first programme that is completed is the fastest one; `tests/unit/test_synthesis`
compares it with exhaustive search. States that are slower than data parallelism are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from poplar.planner.graph.graph import LEAVES, PARAMETER, Graph, Node
from poplar.planner.graph.placement import PARTIAL, REPLICATED, Placement
from poplar.planner.graph.programme import Programme
from poplar.planner.rules.pattern import Pattern
from poplar.planner.rules.registry import pattern_of, strategies_of
from poplar.planner.rules.strategy import Strategy
from poplar.planner.synthesis.composition import batch_placements, composed
from poplar.planner.synthesis.costs import Costs, programme_seconds, trained_nodes
from poplar.planner.synthesis.data_parallel import data_parallel
from poplar.planner.synthesis.units import axis_units

_Place = tuple[Placement, frozenset[Placement]]
"""Placement of a tensor as it was computed, and those to which it was moved; those that cost
nothing, parts of a replicated tensor, are left out."""
_State = tuple[tuple[str, _Place], ...]
"""Of the tensors that are still needed, by name."""


_ROUNDING = 1e-9
"""Relative difference of sums in another order."""


class SearchTooLong(ValueError):
    """More states than the search may visit."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A strategy of a node and its seconds of compute."""

    strategy: Strategy
    seconds: float


@dataclass(frozen=True, slots=True)
class _Visit:
    """A state with the way to it."""

    seconds: float
    index: int
    state: _State
    before: _Visit | None
    strategy: Strategy | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundProgramme:
    """The fastest programme."""

    programme: Programme
    seconds: float
    """As `programme_seconds` predicts."""
    states: int
    """That the search visited."""


def fastest_programme(graph: Graph, costs: Costs, limit: int = 200_000) -> FoundProgramme:
    """The programme with the fewest predicted seconds.

    Its loss is partial. If that is not possible, as for the square root of a sum, it is replicated:
    the gradient of the loss is then `1 / ranks` on every rank.

    Args:
        graph: of a loss.
        costs: of the ranks, with the ratios of the programme.
        limit: of the states to visit.

    Raises:
        SearchTooLong: `limit` was reached.
    """
    search = _Search(graph, costs)
    found = search.run(limit, PARTIAL) or search.run(limit, REPLICATED)
    if found is None:
        raise AssertionError("every node can be computed by all ranks")
    return found


class _Search:
    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self.nodes = [n for n in graph.nodes.values() if n.operator not in LEAVES]
        self.trained = trained_nodes(graph)
        patterns = {node.name: pattern_of(graph, node) for node in self.nodes}
        units = axis_units(graph, patterns)
        self.choices = [
            list(self._choices(node, patterns[node.name], units[node.name])) for node in self.nodes
        ]
        self.bounds = [0.0] * (len(self.nodes) + 1)
        for index in reversed(range(len(self.nodes))):
            fastest = min(choice.seconds for choice in self.choices[index])
            self.bounds[index] = self.bounds[index + 1] + fastest
        self.last_read = {
            name: index for index, node in enumerate(self.nodes) for name in node.inputs
        }
        self.batch = batch_placements(graph)
        known = data_parallel(graph, costs.ratios)
        self.known = known.placements[graph.output], programme_seconds(graph, known, costs)

    def run(self, limit: int, loss: Placement) -> FoundProgramme | None:
        """The fastest programme with such a loss; None if there is none."""
        start: _State = tuple(
            (name, (placement, frozenset())) for name, placement in self.batch.items()
        )
        order = count()
        slowest = self.known[1] * (1.0 + _ROUNDING) if self.known[0] == loss else math.inf
        queue = [(self.bounds[0], next(order), _Visit(0.0, 0, start, None, None))]
        visited: set[tuple[int, _State]] = set()
        while queue:
            _, _, visit = heapq.heappop(queue)
            if (visit.index, visit.state) in visited:
                continue
            visited.add((visit.index, visit.state))
            if visit.index == len(self.nodes):
                if dict(visit.state)[self.graph.output][0] == loss:
                    return self._found(visit, len(visited))
                continue
            if len(visited) > limit:
                raise SearchTooLong(
                    f"no programme was completed with {limit} states; "
                    f"{visit.index} of {len(self.nodes)} nodes were placed"
                )
            for following in self._following(visit):
                bound = following.seconds + self.bounds[following.index]
                if bound <= slowest and (following.index, following.state) not in visited:
                    # Of equal bounds, the one that has placed most nodes.
                    heapq.heappush(queue, (bound, -next(order), following))
        return None

    def _choices(
        self, node: Node, pattern: Pattern, units: Mapping[str, set[int]]
    ) -> Iterator[_Choice]:
        is_trained = node.name in self.trained
        for strategy in strategies_of(self.graph, node, lambda axis: sorted(units[axis])):
            seconds = self.costs.compute_seconds(pattern, strategy, trained=is_trained)
            yield _Choice(strategy, seconds)

    def _following(self, visit: _Visit) -> Iterator[_Visit]:
        node = self.nodes[visit.index]
        for choice in self.choices[visit.index]:
            places: dict[str, _Place] = dict(visit.state)
            moved = self._move_inputs(node, choice.strategy, places)
            if moved is None:
                continue
            places[node.name] = (choice.strategy.output, frozenset())
            state = tuple(
                (name, place)
                for name, place in sorted(places.items(), key=lambda item: item[0])
                if self.last_read.get(name, -1) > visit.index or name == self.graph.output
            )
            seconds = visit.seconds + choice.seconds + moved
            yield _Visit(seconds, visit.index + 1, state, visit, choice.strategy)

    def _move_inputs(
        self, node: Node, strategy: Strategy, places: dict[str, _Place]
    ) -> float | None:
        """Seconds of what the node needs to read its inputs, entered in `places`; None if they
        cannot be read.
        """
        seconds = 0.0
        for name, target in dict(zip(node.inputs, strategy.inputs, strict=True)).items():
            source = self.graph.nodes[name]
            if target is None:
                continue
            if name not in places:  # a leaf that no node has read yet
                if target is PARTIAL:
                    return None
                if source.operator == PARAMETER:
                    seconds += self.costs.gradient_seconds(source.output, target)
                    places[name] = (target, frozenset())
                else:
                    places[name] = (REPLICATED, frozenset())
            own, others = places[name]
            if target == own:
                continue
            if target is PARTIAL or source.returns_list:
                return None
            if target in others or own is REPLICATED:
                continue
            seconds += self.costs.move_seconds(
                source.output, own, target, trained=name in self.trained
            )
            places[name] = (own, others | {target})
        return seconds

    def _found(self, visit: _Visit, states: int) -> FoundProgramme:
        chosen: dict[str, Strategy] = {}
        step: _Visit | None = visit
        while step is not None and step.strategy is not None:
            chosen[self.nodes[step.index - 1].name] = step.strategy
            step = step.before
        chosen = {node.name: chosen[node.name] for node in self.nodes}
        programme = composed(self.graph, self.costs.ratios, self._leaves(chosen), chosen)
        return FoundProgramme(programme=programme, seconds=visit.seconds, states=states)

    def _leaves(self, chosen: Mapping[str, Strategy]) -> dict[str, Placement]:
        """Placements of the leaves: parameters as their first reader needs them."""
        leaves: dict[str, Placement] = {
            name: REPLICATED for name, node in self.graph.nodes.items() if node.operator in LEAVES
        }
        leaves |= self.batch
        first: dict[str, Placement] = {}
        for name, strategy in chosen.items():
            for source, target in zip(self.graph.nodes[name].inputs, strategy.inputs, strict=True):
                if self.graph.nodes[source].operator == PARAMETER and target is not None:
                    first.setdefault(source, target)
        return leaves | first
