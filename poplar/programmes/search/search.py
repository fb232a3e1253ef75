"""The fastest programme of a graph, by A*: one node after another, in the graph's order.

A state says where the tensors are that later nodes read. A parameter is placed by the first node
that reads it. The bound of what is left is the fastest strategy of each node without any
collective, so the first programme that is completed is the fastest one; `tests/unit/test_synthesis`
compares it with exhaustive search. States that are slower than data parallelism are left out, and
those with the placements of a state that is not slower and has more copies.

With a width, of the states with the same number of placed nodes only the first ones are continued.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import NamedTuple

from poplar.programmes.graph.graph import PARAMETER, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.composition import composed, data_parallel, leaf_placements
from poplar.programmes.search.costs import ClusterCosts
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_terms import StepTerms

_ROUNDING = 1e-9
"""Relative difference of sums in another order."""


@dataclass(eq=False, slots=True)
class TensorState:
    """Where one tensor is while nodes are placed. Equal states are one object (`_Search.state`)."""

    placement: Placement
    """The placement in which the tensor was computed."""
    copies: frozenset[Placement]
    """The placements to which it was moved, and in which a later node may read it. Parts of a
    replicated tensor cost nothing and are left out."""
    without_copies: TensorState | None
    """None: it has no copies."""


State = tuple[TensorState, ...]
"""The tensors that are still needed, in the order of the graph."""
_Reading = Callable[[TensorState], tuple[TensorState, float]]
"""What one node's reading a tensor in a placement does: from the tensor's state before, the next
one, and seconds."""


class _Choice(NamedTuple):
    """A strategy of a node."""

    strategy: Strategy
    seconds: float
    """Seconds of compute, and of the gradients of parameters that this node reads first."""
    readings: tuple[tuple[int, _Reading], ...]
    """By slot of the tensors that are read."""
    placed: tuple[TensorState, ...]
    """States of the leaves that this node reads first, and of its output."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What placing one node does to a state."""

    kept: tuple[int, ...]
    """Of the tensors of the state before, leaves that are read first, and the output: those that
    are still needed after the step."""
    follows: bool
    """Whether no input is moved if there is a choice without that."""
    choices: tuple[_Choice, ...]


class _Visit(NamedTuple):
    """A state with the way to it."""

    seconds: float
    placed: int
    """Number of nodes that are placed."""
    state: State
    before: _Visit | None
    strategy: Strategy | None


def fastest_in(
    space: SearchSpace, costs: ClusterCosts, *, width: int | None = None
) -> Programme | None:
    """The programme of a space with the fewest predicted seconds.

    Its loss is partial. If that is not possible, as for the square root of a sum, it is replicated:
    the gradient of the loss is then `1 / ranks` on every rank.

    Args:
        costs: of the ranks, with the ratios of the programme.
        width: of the states with the same number of placed nodes to continue, those of the lowest
            bounds; None: all.

    Returns:
        None if no programme of the space is as fast as data parallelism, or a width leaves it out.
    """
    search = _Search(space, costs, width)
    found = search.run(PARTIAL)
    if found is None and search.known[0] is REPLICATED:
        found = search.run(REPLICATED)
    return found


class _Search:
    def __init__(self, space: SearchSpace, costs: ClusterCosts, width: int | None) -> None:
        self.space, self.costs, self.width = space, costs, width
        self.graph, self.nodes = space.graph, space.nodes
        self.states: dict[tuple[Placement, frozenset[Placement]], TensorState] = {}
        self.moves: dict[tuple[str, Placement, Placement], float] = {}
        self.steps = list(self._steps())
        self.bounds = [0.0] * (len(self.nodes) + 1)
        for index in reversed(range(len(self.nodes))):
            fastest = min(choice.seconds for choice in self.steps[index].choices)
            self.bounds[index] = self.bounds[index + 1] + fastest
        known = data_parallel(self.graph, costs.ratios)
        seconds = costs.programme_seconds(StepTerms.of(self.graph, known))
        self.known = known.placements[self.graph.output], seconds

    def state(
        self, placement: Placement, copies: frozenset[Placement] = frozenset()
    ) -> TensorState:
        """The state of a tensor with these placements."""
        key = placement, copies
        if key not in self.states:
            plain = self.state(placement) if copies else None
            self.states[key] = TensorState(placement, copies, plain)
        return self.states[key]

    def _steps(self) -> Iterator[_Step]:
        last_read = {n: index for index, node in enumerate(self.nodes) for n in node.inputs}
        last_read[self.graph.output] = len(self.nodes)
        later = self._targets_of_later_nodes()
        live = list(self.space.batch)
        for index, node in enumerate(self.nodes):
            first = [name for name in dict.fromkeys(node.inputs) if name not in live]
            extended = (*live, *first, node.name)
            kept = [name for name in extended if last_read.get(name, -1) > index]
            yield _Step(
                kept=tuple(map(extended.index, kept)),
                follows=node.name in self.space.followers,
                choices=tuple(self._choices(node, live, first, later[index])),
            )
            live = kept

    def _targets_of_later_nodes(self) -> list[dict[str, frozenset[Placement]]]:
        """For each node and tensor that it reads: placements in which later nodes may read it."""
        after: dict[str, frozenset[Placement]] = {}
        found: list[dict[str, frozenset[Placement]]] = []
        for node in reversed(self.nodes):
            found.append({name: after.get(name, frozenset()) for name in node.inputs})
            for strategy in self.space.strategies[node.name]:
                for name, target in zip(node.inputs, strategy.inputs, strict=True):
                    after[name] = after.get(name, frozenset()) | {target}
        return found[::-1]

    def _choices(
        self,
        node: Node,
        live: Sequence[str],
        first: Sequence[str],
        later: Mapping[str, frozenset[Placement]],
    ) -> Iterator[_Choice]:
        """The strategies of a node.

        Args:
            live: tensors of the state before.
            first: leaves that this node reads first.
            later: the placements in which later nodes may read a tensor.
        """
        pattern, is_trained = pattern_of(self.graph, node), node.name in self.space.trained
        readings: dict[tuple[str, Placement], _Reading] = {}
        for strategy in self.space.strategies[node.name]:
            targets = dict(zip(node.inputs, strategy.inputs, strict=True))
            if any(targets[name] is PARTIAL for name in first):
                continue
            seconds = self.costs.node_seconds(pattern, strategy, trained=is_trained)
            placed = []
            for name in first:
                leaf, own = self.graph.nodes[name], targets[name]
                if leaf.is_trained:
                    seconds += self.costs.gradient_seconds(leaf.output, own)
                placed.append(self.state(own if leaf.operator == PARAMETER else REPLICATED))
            read = [key for key in targets.items() if key[0] in live]
            for key in read:
                if key not in readings:
                    readings[key] = self._reading(*key, later[key[0]])
            yield _Choice(
                strategy,
                seconds,
                tuple((live.index(key[0]), readings[key]) for key in read),
                (*placed, self.state(strategy.output)),
            )

    def _reading(self, name: str, target: Placement, later: frozenset[Placement]) -> _Reading:
        """Reads a tensor in a placement.

        Args:
            later: the placements in which later nodes may read it.
        """

        @cache
        def read(before: TensorState) -> tuple[TensorState, float]:
            copies, seconds = before.copies, 0.0
            if target != before.placement and target not in copies:
                seconds = self.move(name, before.placement, target)
                if before.placement is not REPLICATED:
                    copies |= {target}
            return self.state(before.placement, copies & later), seconds

        return read

    def run(self, loss: Placement) -> Programme | None:
        """The fastest programme with such a loss; None if there is none."""
        start = tuple(map(self.state, self.space.batch.values()))
        order = count()
        slowest = self.known[1] * (1.0 + _ROUNDING) if self.known[0] == loss else math.inf
        queue = [(self.bounds[0], next(order), _Visit(0.0, 0, start, None, None))]
        visited: list[dict[State, list[State]]] = [{} for _ in range(len(self.nodes) + 1)]
        continued = [0] * (len(self.nodes) + 1)
        while queue:
            _, _, visit = heapq.heappop(queue)
            if self.width is not None and continued[visit.placed] >= self.width:
                continue
            if _is_dominated(visit.state, visited[visit.placed]):
                continue
            continued[visit.placed] += 1
            if visit.placed == len(self.nodes):
                if visit.state[0].placement == loss:
                    return self._found(visit)
                continue
            remaining = self.bounds[visit.placed + 1]
            for following in self._following(visit):
                bound = following.seconds + remaining
                if bound <= slowest:
                    # Of equal bounds, the one that has placed most nodes.
                    heapq.heappush(queue, (bound, -next(order), following))
        return None

    def _following(self, visit: _Visit) -> Sequence[_Visit]:
        """The states after the next node, one for each of its strategies that is possible."""
        step = self.steps[visit.placed]
        kept = step.kept
        found: list[_Visit] = []
        unmoved: list[_Visit] = []
        for choice in step.choices:
            tensors, seconds = [*visit.state, *choice.placed], 0.0
            for slot, reading in choice.readings:
                tensors[slot], moved = reading(tensors[slot])
                seconds += moved
            if seconds == math.inf:
                continue
            after = tuple([tensors[slot] for slot in kept])
            total = visit.seconds + choice.seconds + seconds
            found.append(_Visit(total, visit.placed + 1, after, visit, choice.strategy))
            if not seconds:
                unmoved.append(found[-1])
        return unmoved if step.follows and unmoved else found

    def move(self, name: str, source: Placement, target: Placement) -> float:
        """Seconds of moving a tensor; infinite: there is no such move."""
        key = (name, source, target)
        if key not in self.moves:
            node = self.graph.nodes[name]
            if target is PARTIAL or node.returns_list:
                self.moves[key] = math.inf
            else:
                self.moves[key] = self.costs.move_seconds(
                    node.output, source, target, trained=name in self.space.trained
                )
        return self.moves[key]

    def _found(self, visit: _Visit) -> Programme:
        leaves = leaf_placements(self.graph)
        chosen: dict[str, Strategy] = {}
        step: _Visit | None = visit
        while step is not None and step.strategy is not None:
            node = self.nodes[step.placed - 1]
            chosen[node.name] = step.strategy
            # From the last node to the first: a parameter is as its first reader needs it.
            for source, target in zip(node.inputs, step.strategy.inputs, strict=True):
                if self.graph.nodes[source].operator == PARAMETER:
                    leaves[source] = target
            step = step.before
        return composed(self.graph, self.costs.ratios, leaves, dict(reversed(chosen.items())))


def _is_dominated(state: State, known: dict[State, list[State]]) -> bool:
    """Whether a state with these placements and at least these copies is known; else enter it.

    States come in the order of their seconds.
    """
    same = known.setdefault(tuple([tensor.without_copies or tensor for tensor in state]), [])
    for other in same:
        if all(own.copies <= more.copies for own, more in zip(state, other, strict=True)):
            return True
    same.append(state)
    return False
