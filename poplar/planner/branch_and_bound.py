"""The fastest plan of one stage: branch and bound over what each rank may hold.

Memory ties batches to shares: the larger a rank's micro-batch, the less of the state it can own. A
node of the search bounds the caps (largest micro-batches) of all ranks from both sides. Relaxed,
batches may use the upper caps and shares the room that the lower ones leave, and everything splits
(`joint`). If the relaxed step fits, the node is done; otherwise a rank holds too much, and either
its cap is smaller or its share is. Where memory does not bind, the first node is the last.

Deterministic: the search ends after a number of nodes, not of seconds, and `gap` says what it left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from poplar.plan import Plan
from poplar.planner.batch_allocation import MicroBatches, Workload
from poplar.planner.cost_model import StageCosts
from poplar.planner.joint_allocation import TOLERANCE, Relaxed, relaxed
from poplar.planner.memory_model import RankMemory
from poplar.planner.memory_shortfall import (
    NoPlanFits,
    memory_shortfall,
    smallest_shares,
    suffice,
)
from poplar.planner.rank_groups import each, members
from poplar.planner.shard_allocation import Owns, ShareProblem
from poplar.planner.simple_plans import tidied

PREFERENCE = 1e-3
"""Even shares and fewer passes are preferred if they cost no more than this part of a step."""
_MOST_WORK = 1200
"""Nodes times ranks: 8 ranks and a global batch of 512 take seconds."""
_NODES_BEFORE_SETTLING = 40
_SETTLED = 1e-3
"""After so many nodes, a plan that is proven to be this close to the fastest is good enough."""
_NODES_BETWEEN_REPAIRS = 8
_REPAIRS = 3
"""Turns of fitting caps to shares and shares to batches, to make a plan of a relaxed one."""


class Request(NamedTuple):
    """What a plan is wanted for."""

    global_batch: int
    max_micro_batch: int
    """Largest micro-batch that is allowed on any rank."""
    preference: float = PREFERENCE
    """How much slower than the fastest, as a fraction, a plan with even shares or fewer passes may
    be to be chosen instead: fewer surprises."""


class Decision(NamedTuple):
    """A plan, and how much faster, relative to it, another may be that was searched for."""

    plan: Plan
    gap: float = 0.0


class Found(NamedTuple):
    """Batches and shares that fit, and their step."""

    seconds: float
    micro_batches: MicroBatches
    shares: tuple[float, ...]


def exact(costs: StageCosts, request: Request) -> Decision:
    """The fastest plan of one stage.

    Raises:
        NoPlanFits: says what is missing.
    """
    missing = memory_shortfall(costs)
    if missing is not None:
        raise NoPlanFits([missing])
    ranks = costs.cluster.world_size
    workload = Workload(costs, request.global_batch)
    even = at_shares(costs, workload, (1.0 / ranks,) * ranks, request)
    if costs.shares_matter:
        fastest, bound = _Search(costs, workload, request, even).run()
    else:
        assert even is not None, "there is no memory shortfall"
        fastest, bound = even, even.seconds
    most = fastest.seconds * (1.0 + request.preference)
    chosen = even if even is not None and even.seconds <= most else fastest
    chosen = _tidied(costs, chosen, request, most)
    gap = 1.0 - bound / chosen.seconds if chosen.seconds > 0.0 else 0.0
    plan = Plan(
        stage=costs.stage,
        global_batch=request.global_batch,
        micro_batches=chosen.micro_batches,
        shares=chosen.shares,
    )
    return Decision(plan, gap if gap > TOLERANCE else 0.0)


def at_shares(
    costs: StageCosts, workload: Workload, shares: Sequence[float], request: Request
) -> Found | None:
    """The fastest batches under these shares, or None if none fits."""
    caps = _caps(costs, shares, request)
    if min(caps) < 0 or max(caps) < 1:
        return None
    communication = costs.communication(shares)
    if costs.synchronizes_every_pass:
        every = workload.every_pass(caps)
        micro_batches = every.micro_batches(every.at(communication)[1])
    else:
        micro_batches = workload.once_per_step(caps).at(communication)[1].micro_batches
    return _found(costs, micro_batches, tuple(shares))


def _found(costs: StageCosts, micro_batches: MicroBatches, shares: tuple[float, ...]) -> Found:
    return Found(costs.step_seconds(micro_batches, shares), micro_batches, shares)


def _caps(costs: StageCosts, shares: Sequence[float], request: Request) -> tuple[int, ...]:
    """By rank, the largest micro-batch that its share leaves room for; -1: it does not fit."""
    memories = _memory_of_kinds(costs)

    def cap(kind_and_share: tuple[int, float]) -> int:
        kind, share = kind_and_share
        return memories[kind].largest_batch(share, request.max_micro_batch)

    return tuple(each(cap, list(zip(costs.cluster.device_kinds, shares, strict=True))))


def _memory_of_kinds(costs: StageCosts) -> dict[int, RankMemory]:
    return dict(zip(costs.cluster.device_kinds, costs.memories, strict=True))


def _tidied(costs: StageCosts, found: Found, request: Request, most: float) -> Found:
    """The same with fewer passes, if that takes no more than `most` seconds."""
    if costs.synchronizes_every_pass:
        return found
    caps = _caps(costs, found.shares, request)
    batches = tidied(costs, found.micro_batches, caps, max(0.0, most - found.seconds))
    tidy = _found(costs, batches, found.shares)
    return tidy if tidy.seconds <= max(most, found.seconds * (1.0 + TOLERANCE)) else found


@dataclass(frozen=True, slots=True)
class _Node:
    """Caps between two bounds on every rank, and which ranks own a part of the state."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    owns: tuple[Owns, ...]


class _Search:
    """Best-first branch and bound over nodes."""

    def __init__(
        self, costs: StageCosts, workload: Workload, request: Request, known: Found | None
    ) -> None:
        self._costs = costs
        self._workload = workload
        self._request = request
        self._best = known
        self._nodes: list[tuple[float, int, _Node, Relaxed]] = []
        self._number = count()
        self._kinds = costs.cluster.device_kinds
        self._memories = _memory_of_kinds(costs)
        self._twins = members(costs.cluster.rank_kinds)
        """Equal ranks: a plan stays as fast when they change places, so that their caps may be
        taken as descending."""
        self._twins_of = {rank: twins for twins in self._twins for rank in twins}

    def run(self) -> tuple[Found, float]:
        """The fastest step found, and a bound that none is below."""
        self._keep(self._repaired(self._roomy_shares()))
        self._add(self._root())
        closed = math.inf
        for done in range(_MOST_WORK // self._costs.cluster.world_size + 1):
            enough = _SETTLED if done >= _NODES_BEFORE_SETTLING else TOLERANCE
            if not self._nodes or self._nodes[0][0] >= self._limit_within(enough):
                break
            _, _, node, answer = heapq.heappop(self._nodes)
            children = self._branches(node, answer)
            if not children:
                closed = min(closed, answer.bound)
            for child in children:
                self._add(child)
        assert self._best is not None
        bound = min([closed, self._best.seconds, *(entry[0] for entry in self._nodes[:1])])
        return self._best, bound

    def _root(self) -> _Node:
        devices, most = self._costs.cluster.devices, self._request.max_micro_batch
        return _Node(
            low=(0,) * len(devices),
            high=tuple(min(most, device.max_batch) for device in devices),
            owns=tuple(
                Owns.OPEN if device.optimizer_latency_seconds > 0.0 else Owns.SOMETHING
                for device in devices
            ),
        )

    @property
    def _limit(self) -> float:
        return self._limit_within(TOLERANCE)

    def _limit_within(self, tolerance: float) -> float:
        """What a step has to be below to be of interest."""
        return math.inf if self._best is None else self._best.seconds * (1.0 - tolerance)

    def _keep(self, found: Found | None) -> None:
        if found is not None and (self._best is None or found.seconds < self._best.seconds):
            self._best = found

    def _roomy_shares(self) -> tuple[float, ...]:
        """Shares in proportion to the room beside one sample, if all ranks can hold one."""
        room = each(lambda kind: self._memories[kind].largest_share(1), self._kinds)
        if min(room) < 0.0 or not suffice(room):
            return smallest_shares(self._costs)[0]
        total = math.fsum(room)
        return tuple(part / total for part in room)

    def _add(self, node: _Node) -> None:
        tightened = self._tightened(node)
        if tightened is None:
            return
        node, upper = tightened
        problem = ShareProblem(self._costs, upper, node.owns)
        answer = relaxed(self._costs, self._workload, node.high, problem, self._limit)
        if answer is None or answer.bound >= self._limit:
            return
        self._keep(self._fitted(answer))
        number = next(self._number)
        if number < _NODES_BEFORE_SETTLING or number % _NODES_BETWEEN_REPAIRS == 0:
            self._keep(self._repaired(answer.shares))
        if answer.bound < self._limit:
            heapq.heappush(self._nodes, (answer.bound, number, node, answer))

    def _tightened(self, node: _Node) -> tuple[_Node, list[float]] | None:
        """The node without caps that its shares rule out, and its shares' bounds; None: empty."""

        def most_owned(key: tuple[int, int, Owns]) -> float:
            kind, low, owns = key
            share = self._memories[kind].largest_share(low)
            return min(0.0, share) if owns is Owns.NOTHING else share

        upper = each(most_owned, list(zip(self._kinds, node.low, node.owns, strict=True)))
        room = math.fsum(upper)
        if min(upper) < 0.0 or not suffice(upper):
            return None

        def most_held(key: tuple[int, float, int]) -> int:
            kind, own, most = key
            return self._memories[kind].largest_batch(max(0.0, 1.0 - (room - own)), most)

        high = each(most_held, list(zip(self._kinds, upper, node.high, strict=True)))
        if max(high) < 1 or any(h < low for h, low in zip(high, node.low, strict=True)):
            return None
        return replace(node, high=tuple(high)), upper

    def _fitted(self, answer: Relaxed) -> Found | None:
        """The batches of a relaxed answer with the best shares that leave room for them."""

        def most_owned(kind_and_batch: tuple[int, int]) -> float:
            kind, largest = kind_and_batch
            return self._memories[kind].largest_share(largest)

        upper = each(most_owned, list(zip(self._kinds, _largest(answer), strict=True)))
        problem = ShareProblem(self._costs, upper)
        if not problem.is_feasible:
            return None
        shared = problem.cheapest(self._costs.synchronizations(answer.micro_batches))
        return _found(self._costs, answer.micro_batches, shared.shares)

    def _repaired(self, shares: tuple[float, ...]) -> Found | None:
        """The best batches under these shares, then the best shares for those, and so on."""
        best = None
        for _ in range(_REPAIRS):
            found = at_shares(self._costs, self._workload, shares, self._request)
            if found is None or (best is not None and found.seconds >= best.seconds):
                break
            best = found
            fitted = self._fitted(Relaxed(0.0, found.micro_batches, found.shares))
            if fitted is None or fitted.seconds >= best.seconds:
                break
            best, shares = fitted, fitted.shares
        return best

    def _branches(self, node: _Node, answer: Relaxed) -> list[_Node]:
        """Nodes that together hold every plan of this one, and not its relaxed answer."""
        keys = list(zip(self._kinds, _largest(answer), answer.shares, strict=True))

        def missing(key: tuple[int, int, float]) -> float | None:
            kind, used, share = key
            memory = self._memories[kind]
            return None if memory.fits(used, share) else memory.needed(used, share) / memory.limit

        excess = [
            (much, -rank, keys[rank][1])
            for rank, much in enumerate(each(missing, keys))
            if much is not None
        ]
        if excess:
            _, rank, used = max(excess)
            return self._by_cap(node, -rank, used, answer.shares[-rank])
        return self._by_ownership(node, answer.shares)

    def _by_cap(self, node: _Node, rank: int, used: int, share: float) -> list[_Node]:
        fitting = self._costs.memories[rank].largest_batch(share, used)
        cap = (fitting + used + 1) // 2
        twins = self._twins_of[rank]
        place = twins.index(rank)
        high, low = list(node.high), list(node.low)
        for twin in twins[place:]:
            high[twin] = min(high[twin], cap - 1)
        for twin in twins[: place + 1]:
            low[twin] = max(low[twin], cap)
        return [replace(node, high=tuple(high)), replace(node, low=tuple(low))]

    def _by_ownership(self, node: _Node, shares: Sequence[float]) -> list[_Node]:
        undecided = [
            (self._costs.optimizer_seconds(rank, share), -rank)
            for rank, share in enumerate(shares)
            if node.owns[rank] is Owns.OPEN and share > 0.0
        ]
        if not undecided:
            return []
        rank = -max(undecided)[1]
        before, after = node.owns[:rank], node.owns[rank + 1 :]
        return [
            replace(node, owns=(*before, own, *after)) for own in (Owns.SOMETHING, Owns.NOTHING)
        ]


def _largest(answer: Relaxed) -> list[int]:
    """By rank, its largest pass."""
    return each(lambda passes: max(passes, default=0), answer.micro_batches)
