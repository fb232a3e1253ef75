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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.search.composition import batch_placements, composed
from poplar.programmes.search.costs import ClusterCosts
from poplar.programmes.search.data_parallel import data_parallel
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_terms import StepTerms
from poplar.programmes.search.tensor_state import State, TensorState, TensorStates

_ROUNDING = 1e-9
"""Relative difference of sums in another order."""


class SearchTooLong(ValueError):
    """More states than the search may visit."""


class _Reading(dict[TensorState, tuple[TensorState, float]]):
    """What one node's reading a tensor in a placement does: the tensor's next state, and seconds.

    Computed once for each state that the tensor has before.
    """

    def __init__(self, search: _Search, step: _Step, slot: int, target: Placement | None) -> None:
        super().__init__()
        self._search, self._step, self._slot, self._target = search, step, slot, target

    def __missing__(self, before: TensorState) -> tuple[TensorState, float]:
        self[before] = self._after(before)
        return self[before]

    def _after(self, before: TensorState) -> tuple[TensorState, float]:
        target, step, slot = self._target, self._step, self._slot
        copies, noted, seconds = before.copies, before.noted, 0.0
        if target is not None:
            if slot in step.noted:
                noted |= {target}
            if target != before.placement and target not in copies:
                moved = self._search.move(step.extended[slot], before.placement, target)
                if before.placement is not REPLICATED:  # parts of those cost nothing
                    copies |= {target}
                seconds = step.noted.get(slot, step.times) * moved
        if copies:
            copies &= step.later[slot]
        if noted is before.noted and copies == before.copies:
            return before, seconds
        return self._search.states.of(before.placement, copies, noted), seconds


class _HandingOn(dict[tuple[TensorState, TensorState], tuple[TensorState, float]]):
    """What a block's handing on its output does, by the states of what it was given and of the
    output: the next state of what it was given, and the seconds in which the output is moved to
    where the next repetitions read it.
    """

    def __init__(self, search: _Search, name: str, times: int) -> None:
        super().__init__()
        self._search, self._name, self._times = search, name, times

    def __missing__(self, states: tuple[TensorState, TensorState]) -> tuple[TensorState, float]:
        given, output = states
        seconds = self._times * math.fsum(
            self._search.move(self._name, output.placement, target)
            for target in given.noted
            if target != output.placement
        )
        self[states] = self._search.states.of(given.placement, given.copies), seconds
        return self[states]


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

    node: Node
    times: int
    extended: tuple[str, ...]
    """Names by slot: the tensors of the state before, leaves that are read first, the output."""
    later: Mapping[int, frozenset[Placement]]
    """The placements in which later nodes may read a tensor, by slots that are read."""
    kept: tuple[int, ...]
    """Slots of the tensors that are still needed after the step."""
    follows: bool
    """Whether no input is moved if there is a choice without that."""
    noted: Mapping[int, int]
    """How often a tensor is read, by slots that only the first repetition of the node reads."""
    handed: tuple[int, _HandingOn] | None
    """If the output is handed on to the next repetition of its block: the slot of what the first
    repetition reads in its place."""
    choices: list[_Choice]


class _Visit(NamedTuple):
    """A state with the way to it."""

    seconds: float
    placed: int
    """Number of nodes that are placed."""
    state: State
    before: _Visit | None
    strategy: Strategy | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundProgramme:
    """The fastest programme."""

    programme: Programme
    seconds: float
    """Seconds by the costs of the search."""
    states: int
    """Number of states that the search visited."""
    is_complete: bool = True
    """Whether no state was left out because of the width."""


def fastest_in(
    space: SearchSpace, costs: ClusterCosts, *, limit: int = 200_000, width: int | None = None
) -> FoundProgramme | None:
    """The programme of a space with the fewest predicted seconds.

    Its loss is partial. If that is not possible, as for the square root of a sum, it is replicated:
    the gradient of the loss is then `1 / ranks` on every rank.

    Args:
        space: the strategies to choose from.
        costs: of the ranks, with the ratios of the programme.
        limit: of the states to visit.
        width: of the states with the same number of placed nodes to continue, those of the lowest
            bounds; None: all.

    Returns:
        None if no programme of the space is as fast as data parallelism, or a width leaves it out.

    Raises:
        SearchTooLong: `limit` was reached.
    """
    search = _Search(space, costs, width)
    found = search.run(limit, PARTIAL)
    if found is None and search.known[0] is REPLICATED:
        found = search.run(limit, REPLICATED)
    return found


class _Search:
    def __init__(self, space: SearchSpace, costs: ClusterCosts, width: int | None) -> None:
        self.space, self.costs, self.width = space, costs, width
        self.graph, self.nodes = space.graph, space.nodes
        self.states = TensorStates()
        self.moves: dict[tuple[str, Placement, Placement], float] = {}
        self.steps = list(self._steps())
        self.bounds = [0.0] * (len(self.nodes) + 1)
        for index in reversed(range(len(self.nodes))):
            fastest = min(choice.seconds for choice in self.steps[index].choices)
            self.bounds[index] = self.bounds[index + 1] + fastest
        known = data_parallel(space.whole, costs.ratios)
        seconds = costs.programme_seconds(StepTerms.of(space.whole, known))
        self.known = known.placements[space.whole.output], seconds

    def _steps(self) -> Iterator[_Step]:
        carried, times = self.space.folded.carried, self.space.folded.times
        places = {node.name: index for index, node in enumerate(self.nodes)}
        last_read = {n: index for index, node in enumerate(self.nodes) for n in node.inputs}
        for inner, outer in carried.items():
            last_read[outer] = max(places[inner], last_read.get(outer, 0))
        last_read[self.graph.output] = len(self.nodes)
        later = self._targets_of_later_nodes()
        live = list(self.space.batch)
        for index, node in enumerate(self.nodes):
            read = dict.fromkeys(node.inputs)
            first = [name for name in read if name not in live]
            extended = (*live, *first, node.name)
            slots = {name: slot for slot, name in enumerate(extended)}
            given = carried.get(node.name)
            first_only = {
                outer
                for inner, outer in carried.items()
                if outer in read and index <= places[inner] and times(node.name) > times(outer)
            }
            kept = [name for name in extended if last_read.get(name, -1) > index]
            step = _Step(
                node=node,
                times=times(node.name),
                extended=extended,
                later={slots[name]: later[index][name] for name in read},
                kept=tuple(slots[name] for name in kept),
                follows=node.name in self.space.followers,
                noted={slots[name]: times(name) for name in first_only},
                handed=None if given is None else (slots[given], self._handing_on(node, given)),
                choices=[],
            )
            step.choices.extend(self._choices(step, slots, len(live)))
            yield step
            live = kept

    def _handing_on(self, node: Node, outer: str) -> _HandingOn:
        """What a node does whose output stands for `outer` in the next repetitions."""
        times = self.space.folded.times
        return _HandingOn(self, node.name, times(node.name) - times(outer))

    def _targets_of_later_nodes(self) -> list[dict[str, frozenset[Placement]]]:
        """For each node and tensor that it reads: placements in which later nodes may read it."""
        after: dict[str, frozenset[Placement]] = {}
        found: list[dict[str, frozenset[Placement]]] = []
        for node in reversed(self.nodes):
            found.append({name: after.get(name, frozenset()) for name in node.inputs})
            for strategy in self.space.strategies[node.name]:
                for name, target in zip(node.inputs, strategy.inputs, strict=True):
                    if target is not None:
                        after[name] = after.get(name, frozenset()) | {target}
        return found[::-1]

    def _choices(self, step: _Step, slots: Mapping[str, int], live: int) -> Iterator[_Choice]:
        node, times = step.node, self.space.folded.times
        pattern, is_trained = self.space.patterns[node.name], node.name in self.space.trained
        readings: dict[tuple[int, Placement | None], _Reading] = {}
        for strategy in self.space.strategies[node.name]:
            targets = dict(zip(node.inputs, strategy.inputs, strict=True))
            seconds = self.costs.node_seconds(pattern, strategy, trained=is_trained)
            seconds *= step.times
            placed = []
            for name in step.extended[live:-1]:
                target, leaf = targets[name], self.graph.nodes[name]
                if target is PARTIAL:
                    break
                own: Placement = REPLICATED
                if leaf.operator == PARAMETER:
                    own = REPLICATED if target is None else target
                    seconds += times(name) * self.costs.gradient_seconds(leaf.output, own)
                placed.append(self.states.of(own))
            else:
                read = [(slots[name], target) for name, target in targets.items()]
                for key in read:
                    if key[0] < live and key not in readings:
                        readings[key] = _Reading(self, step, *key)
                yield _Choice(
                    strategy,
                    seconds,
                    tuple((key[0], readings[key]) for key in read if key[0] < live),
                    (*placed, self.states.of(strategy.output)),
                )

    def run(self, limit: int, loss: Placement) -> FoundProgramme | None:
        """The fastest programme with such a loss; None if there is none."""
        start = tuple(map(self.states.of, self.space.batch.values()))
        order = count()
        slowest = self.known[1] * (1.0 + _ROUNDING) if self.known[0] == loss else math.inf
        queue = [(self.bounds[0], next(order), _Visit(0.0, 0, start, None, None))]
        visited: list[dict[State, list[State]]] = [{} for _ in range(len(self.nodes) + 1)]
        continued = [0] * (len(self.nodes) + 1)
        is_complete, states = True, 0
        while queue:
            _, _, visit = heapq.heappop(queue)
            if self.width is not None and continued[visit.placed] >= self.width:
                is_complete = False
                continue
            if _is_dominated(visit.state, visited[visit.placed]):
                continue
            continued[visit.placed] += 1
            states += 1
            if visit.placed == len(self.nodes):
                if visit.state[0].placement == loss:
                    return self._found(visit, states, is_complete=is_complete)
                continue
            if states > limit:
                raise SearchTooLong(
                    f"no programme was completed with {limit} states; "
                    f"{visit.placed} of {len(self.nodes)} nodes were placed"
                )
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
                tensors[slot], moved = reading[tensors[slot]]
                seconds += moved
            moves_inputs = seconds > 0.0
            if step.handed is not None:
                slot, handing_on = step.handed
                tensors[slot], moved = handing_on[tensors[slot], tensors[-1]]
                seconds += moved
            if seconds == math.inf:
                continue
            after = tuple([tensors[slot] for slot in kept])
            total = visit.seconds + choice.seconds + seconds
            found.append(_Visit(total, visit.placed + 1, after, visit, choice.strategy))
            if not moves_inputs:
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

    def _found(self, visit: _Visit, states: int, *, is_complete: bool) -> FoundProgramme:
        strategies: dict[str, Strategy] = {}
        step: _Visit | None = visit
        while step is not None and step.strategy is not None:
            strategies[self.nodes[step.placed - 1].name] = step.strategy
            step = step.before
        folded, whole = self.space.folded, self.space.whole
        for name in list(strategies):
            strategies |= dict.fromkeys(folded.members(name), strategies[name])
        chosen = {name: strategies[name] for name in whole.nodes if name in strategies}
        programme = composed(whole, self.costs.ratios, _leaves(whole, chosen), chosen)
        seconds = visit.seconds
        if folded.repetitions:
            seconds = self.costs.programme_seconds(StepTerms.of(whole, programme))
        return FoundProgramme(
            programme=programme, seconds=seconds, states=states, is_complete=is_complete
        )


def _is_dominated(state: State, known: dict[State, list[State]]) -> bool:
    """Whether a state with these placements and at least these copies is known; else enter it.

    States come in the order of their seconds.
    """
    same = known.setdefault(tuple([tensor.without_copies for tensor in state]), [])
    for other in same:
        if all(
            own is more or own.copies <= more.copies for own, more in zip(state, other, strict=True)
        ):
            return True
    same.append(state)
    return False


def _leaves(graph: Graph, chosen: Mapping[str, Strategy]) -> dict[str, Placement]:
    """Placements of the leaves: parameters as their first reader needs them."""
    leaves: dict[str, Placement] = {
        name: REPLICATED for name, node in graph.nodes.items() if node.operator in LEAVES
    }
    leaves |= batch_placements(graph)
    first: dict[str, Placement] = {}
    for name, strategy in chosen.items():
        for source, target in zip(graph.nodes[name].inputs, strategy.inputs, strict=True):
            if graph.nodes[source].operator == PARAMETER and target is not None:
                first.setdefault(source, target)
    return leaves | first
