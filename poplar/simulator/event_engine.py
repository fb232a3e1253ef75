"""Event-driven simulation of one step: the reference of the closed form in `planner.cost_model`.

Every rank has a compute stream, which follows its actions (`planner.step_actions`), and a
communication stream, which runs its collectives one after the other. A collective starts on a rank
when the ranks that it needs data from have issued it and the previous collective is complete there.
During a collective, compute on that rank advances by `overlap` seconds per second.

[Note: what the closed form leaves out]
Units of very unequal size in the middle of a model. From stage 2 on, a rank that is early at one
synchronization may start the next pass, so ranks that are last in turn wait less: up to 16 % on
random clusters. `tests/unit/test_simulator.py` holds both to within 3 % of each other elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from poplar.plan import Plan
from poplar.planner.cost_model import costs_of
from poplar.planner.prediction import predict
from poplar.planner.step_actions import Action, Compute, Issue
from poplar.profile import ClusterProfile
from poplar.simulator.action_durations import (
    ActionDurations,
    Collective,
    RankLoad,
    Senders,
    rank_loads,
)
from poplar.simulator.timeline import Span, Timeline


def simulate(cluster: ClusterProfile, plan: Plan) -> Timeline:
    """Simulate one step of a plan on a measured cluster, unit by unit.

    Ranks with equal loads are simulated once, so the cost depends on the number of different
    ranks.

    Raises:
        DoesNotFit: the plan needs more memory than a rank has, or a micro-batch that was not
            measured.
        ValueError: a plan for another number of ranks, or with units of their own strategy.
    """
    predict(cluster, plan)  # raises if the plan cannot run
    costs = costs_of(cluster, plan)
    durations = ActionDurations(costs, plan.shares)
    work = rank_loads(costs, plan.micro_batches, plan.shares)
    simulated = {load: _Rank(load, durations.actions(load).step()) for load in dict.fromkeys(work)}
    _Simulation(simulated.values(), durations, cluster.overlap).run()
    step = max(rank.ended for rank in simulated.values())
    spans = {load: tuple(rank.spans) for load, rank in simulated.items()}
    waiting = {load: max(0.0, step - _covered(spans[load])) for load in simulated}
    return Timeline(
        stage=plan.stage,
        devices=tuple(device.name for device in cluster.devices),
        step_seconds=step,
        spans=tuple(spans[load] for load in work),
        busy_seconds=tuple(simulated[load].computed for load in work),
        waiting_seconds=tuple(waiting[load] for load in work),
    )


def _covered(spans: Iterable[Span]) -> float:
    """Seconds during which at least one stream is busy."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.end > end:
            total += span.end - max(end, span.begin)
            end = span.end
    return total


@dataclass(eq=False, slots=True)
class _Rank:
    """The two streams of one rank, which stands for all ranks with its load."""

    load: RankLoad
    actions: Iterator[Action]
    issued: list[int | None] = field(default_factory=list)
    """By collective: the pass that issued it."""
    completed: int = 0
    """Collectives that are complete."""
    is_communicating: bool = False
    waits_for: int = -1
    """The collective that blocks the compute stream; -1: none."""
    compute: Compute | None = None
    compute_seconds: float = 0.0
    began: float = 0.0
    remaining: float = 0.0
    """Seconds of compute that remained at `updated`."""
    updated: float = 0.0
    rate: float = 1.0
    """Seconds of compute per second."""
    version: int = 0
    """Of the expected end of compute: events with an earlier version are void."""
    computed: float = 0.0
    ended: float = 0.0
    spans: list[Span] = field(default_factory=list)


class _PendingCollective:
    """A collective, and how many ranks have not issued it yet."""

    __slots__ = ("collective", "missing", "missing_owners")

    def __init__(self, collective: Collective, ranks: int, owners: int) -> None:
        self.collective = collective
        self.missing, self.missing_owners = ranks, owners

    def can_start_on(self, rank: _Rank) -> bool:
        senders = self.collective.senders
        if senders is Senders.OWNERS:
            return self.missing_owners == 0
        needs_none = senders is Senders.ALL_TO_OWNERS and not rank.load.owns
        return self.missing == 0 or needs_none


class _Simulation:
    """A queue of events: the end of a rank's compute, or of a collective on some ranks.

    Simultaneous events run in the order in which they were queued, so results are reproducible.
    """

    def __init__(self, ranks: Iterable[_Rank], durations: ActionDurations, overlap: float) -> None:
        self._ranks = list(ranks)
        self._owners = sum(rank.load.owns for rank in self._ranks)
        self._durations = durations
        self._overlap = overlap
        self._collectives: list[_PendingCollective] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, list[_Rank], int]] = []
        """Time, tie-breaker, ranks, and the version of a compute; version -1: a collective."""

    def run(self) -> None:
        """Run a whole step."""
        for rank in self._ranks:
            self._advance(rank, 0.0)
        while self._events:
            now, _, ranks, version = heapq.heappop(self._events)
            if version < 0:
                self._end_collective(ranks, now)
            elif ranks[0].version == version:
                self._end_compute(ranks[0], now)
        assert not any(rank.waits_for >= 0 or rank.compute for rank in self._ranks)

    def _schedule(self, when: float, ranks: list[_Rank], version: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), ranks, version))

    def _advance(self, rank: _Rank, now: float) -> None:
        """Execute actions up to the next one that takes time."""
        for action in rank.actions:
            if isinstance(action, Issue):
                self._issue(rank, action, now)
            elif isinstance(action, Compute):
                seconds = self._durations.compute_seconds(action, rank.load)
                if seconds > 0.0:
                    rank.compute, rank.compute_seconds, rank.remaining = action, seconds, seconds
                    rank.began = rank.updated = now
                    self._schedule_end(rank)
                    return
            elif action.position >= rank.completed:
                rank.waits_for = action.position
                return
        rank.ended = now

    def _schedule_end(self, rank: _Rank) -> None:
        rank.version += 1
        if rank.rate > 0.0:
            self._schedule(rank.updated + rank.remaining / rank.rate, [rank], rank.version)

    def _end_compute(self, rank: _Rank, now: float) -> None:
        done = rank.compute
        assert done is not None
        rank.compute = None
        rank.computed += rank.compute_seconds
        rank.spans.append(Span("compute", *done, rank.began, now))
        self._advance(rank, now)

    def _set_rate(self, rank: _Rank, rate: float, now: float) -> None:
        if rate == rank.rate:
            return
        if rank.compute is not None:
            rank.remaining = max(0.0, rank.remaining - (now - rank.updated) * rank.rate)
            rank.updated = now
        rank.rate = rate
        if rank.compute is not None:
            self._schedule_end(rank)

    def _issue(self, rank: _Rank, action: Issue, now: float) -> None:
        position = len(rank.issued)
        rank.issued.append(action.pass_index)
        if position == len(self._collectives):
            collective = self._durations.collective(action)
            self._collectives.append(_PendingCollective(collective, len(self._ranks), self._owners))
        pending = self._collectives[position]
        pending.missing -= 1
        pending.missing_owners -= rank.load.owns
        opens = pending.missing == 0 or (rank.load.owns and pending.missing_owners == 0)
        self._begin_collectives(self._ranks if opens else [rank], now)

    def _begin_collectives(self, ranks: Iterable[_Rank], now: float) -> None:
        """Start the next collective on each of these ranks where it can start."""
        begun: dict[int, list[_Rank]] = {}
        for rank in ranks:
            position = rank.completed
            if rank.is_communicating or position >= len(rank.issued):
                continue
            pending = self._collectives[position]
            if pending.can_start_on(rank):
                rank.is_communicating = True
                begun.setdefault(position, []).append(rank)
                if pending.collective.seconds > 0.0:
                    blocks = pending.collective.blocks_compute
                    self._set_rate(rank, 0.0 if blocks else self._overlap, now)
        for position, together in begun.items():
            self._schedule(now + self._collectives[position].collective.seconds, together, -1)

    def _end_collective(self, ranks: list[_Rank], now: float) -> None:
        what, unit, seconds = self._collectives[ranks[0].completed].collective[:3]
        spans: dict[int | None, Span] = {}  # ranks share equal spans
        for rank in ranks:
            index = rank.issued[rank.completed]
            if index not in spans:
                spans[index] = Span("communication", what, unit, index, now - seconds, now)
            if seconds > 0.0:
                rank.spans.append(spans[index])
            rank.is_communicating = False
            rank.completed += 1
        self._begin_collectives(ranks, now)
        for rank in ranks:
            if not rank.is_communicating:
                self._set_rate(rank, 1.0, now)
            if 0 <= rank.waits_for < rank.completed:
                rank.waits_for = -1
                self._advance(rank, now)
