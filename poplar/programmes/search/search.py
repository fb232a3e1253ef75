"""The fastest programme of a graph, by A*: one node after another, in the graph's order.

A state says in which placements the tensors are that later nodes read. A parameter is placed by the
first node that reads it. The bound of what is left is the fastest strategy of each node without any
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
from poplar.programmes.search.costs import ProgrammeCosts, programme_seconds
from poplar.programmes.search.data_parallel import data_parallel
from poplar.programmes.search.space import SearchSpace

_ROUNDING = 1e-9
"""Relative difference of sums in another order."""
_BITS = 8
"""Of a placement's number."""
_OWN = (1 << _BITS) - 1
_NOTED = 40
"""Position of the first bit for a placement that a folded block reads."""
_IDENTITY = _OWN | ~((1 << _NOTED) - 1)

_Code = int
"""Of a tensor: the number of the placement in which it was computed, and above `_BITS` one bit for
each placement to which it was moved and in which a later node may read it. Parts of a replicated
tensor cost nothing and are left out. From `_NOTED` on, one bit for each placement in which a folded
block has read it: the next repetitions need these of the tensor that they read in its place."""
_State = tuple[_Code, ...]
"""Of the tensors that are still needed, in the order of `_Step.live`."""


class SearchTooLong(ValueError):
    """More states than the search may visit."""


class _Choice(NamedTuple):
    """A strategy of a node, in numbers."""

    strategy: Strategy
    seconds: float
    """Of compute, and of the gradients of parameters that this node reads first."""
    output: int
    targets: tuple[tuple[int, int], ...]
    """By tensor that is read: its slot in the state before, and the placement's number."""
    first: tuple[_Code, ...]
    """Of leaves that this node reads first."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What placing one node does to a state."""

    node: Node
    times: int
    choices: Sequence[_Choice]
    read: tuple[str, ...]
    """Names by slot of the state before."""
    masks: Mapping[int, int]
    """By slot that is read: the bits of copies that later nodes may read."""
    kept: tuple[int, ...]
    """By tensor after the step: its slot in the state before, extended by first-read leaves and by
    the output."""
    follows: bool
    """Whether no input is moved if there is a choice without that."""
    noted: Mapping[int, int]
    """By slot of a tensor that only the first repetition of the node reads: how many times."""
    handed: tuple[int, int] | None
    """If the output is handed on to the next repetition of its block: the slot of what the first
    repetition reads in its place, and how many repetitions read the output."""


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
    is_complete: bool = True
    """Whether no state was left out because of the width."""


def fastest_programme(graph: Graph, costs: ProgrammeCosts, limit: int = 200_000) -> FoundProgramme:
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
    found = fastest_in(SearchSpace.of(graph), costs, limit=limit)
    if found is None:
        raise AssertionError("every node can be computed by all ranks")
    return found


def fastest_in(
    space: SearchSpace, costs: ProgrammeCosts, *, limit: int = 200_000, width: int | None = None
) -> FoundProgramme | None:
    """The fastest programme of a space, as `fastest_programme`.

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
    def __init__(self, space: SearchSpace, costs: ProgrammeCosts, width: int | None) -> None:
        self.space, self.costs, self.width = space, costs, width
        self.graph, self.nodes = space.graph, space.nodes
        self.placements: dict[str, dict[Placement, int]] = {}
        """By tensor, numbers of its placements."""
        self.of_number: dict[str, list[Placement]] = {}
        self.moves: dict[tuple[str, int, int], float] = {}
        self.steps = list(self._steps())
        self.bounds = [0.0] * (len(self.nodes) + 1)
        for index in reversed(range(len(self.nodes))):
            fastest = min(choice.seconds for choice in self.steps[index].choices)
            self.bounds[index] = self.bounds[index + 1] + fastest
        known = data_parallel(space.whole, costs.ratios)
        seconds = programme_seconds(space.whole, known, costs)
        self.known = known.placements[space.whole.output], seconds

    def _number(self, name: str, placement: Placement) -> int:
        numbers = self.placements.setdefault(name, {})
        if placement not in numbers:
            numbers[placement] = len(numbers)
            self.of_number.setdefault(name, []).append(placement)
        return numbers[placement]

    def _steps(self) -> Iterator[_Step]:
        carried = self.space.folded.carried
        places = {node.name: index for index, node in enumerate(self.nodes)}
        last_read = {n: index for index, node in enumerate(self.nodes) for n in node.inputs}
        for index, node in enumerate(self.nodes):
            if node.name in carried:
                outer = carried[node.name]
                last_read[outer] = max(index, last_read.get(outer, index))
        last_read[self.graph.output] = len(self.nodes)
        later = self._targets_of_later_nodes()
        live = list(self.space.batch)
        for name in live:
            self._number(name, self.space.batch[name])
        for index, node in enumerate(self.nodes):
            read = dict.fromkeys(node.inputs)
            first = [name for name in read if name not in live]
            extended = [*live, *first, node.name]
            slots = {name: slot for slot, name in enumerate(extended)}
            choices = list(self._choices(node, slots, len(live)))
            kept = [name for name in extended if last_read.get(name, -1) > index]
            times = self.space.folded.times
            handed = None
            if node.name in carried:
                outer = carried[node.name]
                handed = slots[outer], times(node.name) - times(outer)
            first_only = {
                outer
                for inner, outer in carried.items()
                if outer in read and index <= places[inner] and times(node.name) > times(outer)
            }
            yield _Step(
                node=node,
                times=times(node.name),
                choices=choices,
                read=tuple(extended),
                masks={slots[name]: later[index].get(name, 0) for name in read},
                kept=tuple(slots[name] for name in kept),
                follows=node.name in self.space.followers,
                noted={slots[name]: times(name) for name in first_only},
                handed=handed,
            )
            live = kept

    def _targets_of_later_nodes(self) -> list[dict[str, int]]:
        """By node: for the tensors that it reads, bits of what nodes after it may read."""
        after: dict[str, int] = {}
        masks: list[dict[str, int]] = []
        for node in reversed(self.nodes):
            masks.append({name: after.get(name, 0) for name in node.inputs})
            for strategy in self.space.strategies[node.name]:
                for name, target in zip(node.inputs, strategy.inputs, strict=True):
                    if target is not None:
                        bit = 1 << (_BITS + self._number(name, target))
                        after[name] = after.get(name, 0) | bit
        return masks[::-1]

    def _choices(self, node: Node, slots: Mapping[str, int], live: int) -> Iterator[_Choice]:
        pattern, is_trained = self.space.patterns[node.name], node.name in self.space.trained
        times = self.space.folded.times
        for strategy in self.space.strategies[node.name]:
            targets = dict(zip(node.inputs, strategy.inputs, strict=True))
            seconds = self.costs.compute_seconds(pattern, strategy, trained=is_trained)
            seconds *= times(node.name)
            first = []
            for name, slot in slots.items():
                if slot < live or name == node.name:
                    continue
                target, leaf = targets[name], self.graph.nodes[name]
                if target is PARTIAL:
                    break
                own: Placement = REPLICATED
                if leaf.operator == PARAMETER:
                    own = REPLICATED if target is None else target
                    seconds += times(name) * self.costs.gradient_seconds(leaf.output, own)
                first.append(self._number(name, own))
            else:
                yield _Choice(
                    strategy,
                    seconds,
                    self._number(node.name, strategy.output),
                    tuple(
                        (slots[name], self._number(name, target))
                        for name, target in targets.items()
                        if target is not None and slots[name] < live
                    ),
                    tuple(first),
                )

    def run(self, limit: int, loss: Placement) -> FoundProgramme | None:
        """The fastest programme with such a loss; None if there is none."""
        batch = self.space.batch
        start: _State = tuple(self._number(name, place) for name, place in batch.items())
        order = count()
        slowest = self.known[1] * (1.0 + _ROUNDING) if self.known[0] == loss else math.inf
        queue = [(self.bounds[0], next(order), _Visit(0.0, 0, start, None, None))]
        visited: list[dict[_State, list[_State]]] = [{} for _ in range(len(self.nodes) + 1)]
        continued = [0] * (len(self.nodes) + 1)
        is_complete, states = True, 0
        while queue:
            _, _, visit = heapq.heappop(queue)
            if self.width is not None and continued[visit.index] >= self.width:
                is_complete = False
                continue
            if _is_dominated(visit.state, visited[visit.index]):
                continue
            continued[visit.index] += 1
            states += 1
            if visit.index == len(self.nodes):
                if self.of_number[self.graph.output][visit.state[0] & _OWN] == loss:
                    return self._found(visit, states, is_complete=is_complete)
                continue
            if states > limit:
                raise SearchTooLong(
                    f"no programme was completed with {limit} states; "
                    f"{visit.index} of {len(self.nodes)} nodes were placed"
                )
            remaining = self.bounds[visit.index + 1]
            for following in self._following(visit):
                bound = following.seconds + remaining
                if bound <= slowest:
                    # Of equal bounds, the one that has placed most nodes.
                    heapq.heappush(queue, (bound, -next(order), following))
        return None

    def _following(self, visit: _Visit) -> list[_Visit]:
        step = self.steps[visit.index]
        found: list[tuple[float, _Visit]] = []
        state, live = visit.state, len(visit.state)
        masks = step.masks
        for choice in step.choices:
            seconds = 0.0
            codes = [*state, *choice.first, choice.output]
            for slot, target in choice.targets:
                code = codes[slot]
                if slot in step.noted:
                    code |= 1 << (_NOTED + target)
                    codes[slot] = code
                if code & _OWN == target or code >> (_BITS + target) & 1:
                    continue
                moved = self._move(step.read[slot], code & _OWN, target)
                if moved < 0.0:
                    continue
                seconds += step.noted.get(slot, step.times) * moved
                codes[slot] = code | 1 << (_BITS + target)
            own_moves = seconds
            if step.handed is not None:
                slot, repetitions = step.handed
                seconds += repetitions * self._handed_on(step, codes[slot], slot, choice)
                codes[slot] &= (1 << _NOTED) - 1
            if seconds == math.inf:
                continue
            for slot, mask in masks.items():
                if slot < live:
                    codes[slot] &= mask | _IDENTITY
            after = tuple([codes[slot] for slot in step.kept])
            total = visit.seconds + choice.seconds + seconds
            following = _Visit(total, visit.index + 1, after, visit, choice.strategy)
            found.append((own_moves, following))
        if step.follows and any(seconds == 0.0 for seconds, _ in found):
            return [following for seconds, following in found if seconds == 0.0]
        return [following for _, following in found]

    def _handed_on(self, step: _Step, code: _Code, slot: int, choice: _Choice) -> float:
        """Seconds in which the output is moved to where the next repetition reads it."""
        seconds, outer = 0.0, step.read[slot]
        for number, placement in enumerate(self.of_number[outer]):
            if code >> (_NOTED + number) & 1 and placement != choice.strategy.output:
                target = self._number(step.node.name, placement)
                moved = self._move(step.node.name, choice.output, target)
                seconds += max(0.0, moved)
        return seconds

    def _move(self, name: str, own: int, target: int) -> float:
        """Seconds of a move; infinite: there is none; -1: a part of a replicated tensor."""
        key = (name, own, target)
        if key not in self.moves:
            self.moves[key] = self._new_move(name, own, target)
        return self.moves[key]

    def _new_move(self, name: str, own: int, target: int) -> float:
        source, placed = self.graph.nodes[name], self.of_number[name]
        if placed[target] is PARTIAL or source.returns_list:
            return math.inf
        if placed[own] is REPLICATED:
            return -1.0
        return self.costs.move_seconds(
            source.output, placed[own], placed[target], trained=name in self.space.trained
        )

    def _found(self, visit: _Visit, states: int, *, is_complete: bool) -> FoundProgramme:
        strategies: dict[str, Strategy] = {}
        step: _Visit | None = visit
        while step is not None and step.strategy is not None:
            strategies[self.nodes[step.index - 1].name] = step.strategy
            step = step.before
        folded = self.space.folded
        for name in list(strategies):
            strategies |= dict.fromkeys(folded.members(name), strategies[name])
        whole = self.space.whole
        chosen = {name: strategies[name] for name in whole.nodes if name in strategies}
        programme = composed(whole, self.costs.ratios, _leaves(whole, chosen), chosen)
        seconds = visit.seconds
        if folded.repetitions:
            seconds = programme_seconds(whole, programme, self.costs)
        return FoundProgramme(
            programme=programme, seconds=seconds, states=states, is_complete=is_complete
        )


def _is_dominated(state: _State, known: dict[_State, list[_State]]) -> bool:
    """Whether a state with these placements and at least these copies is known; else enter it.

    States come in the order of their seconds.
    """
    same = known.setdefault(tuple([code & _IDENTITY for code in state]), [])
    for other in same:
        if not any(code & ~more for code, more in zip(state, other, strict=True)):
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
