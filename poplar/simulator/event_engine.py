"""A step of a plan, event by event: the reference of the closed form in `stage_costs`.

Every rank has a compute stream, which follows its programme (`programme.py`), and a communication
stream, which carries the collectives that it has issued, one after the other, in the order that all
ranks share. A collective begins on a rank when whoever it needs data from has issued it too (so the
last of them opens it) and the one before is over there; it takes what `CollectiveCosts` says, its
unit's part of it. While it lasts, compute on that rank advances by `overlap` seconds a second: that
part of the communication runs under compute, the rest stops compute.

[Note: what the closed form leaves out]
Units of very unequal size in the middle of a model. From stage 2 on, that a rank which is early to
one meeting may go ahead to the next, so that ranks which take turns in being the last wait less: up
to 16 % on random clusters. `tests/unit/test_simulator.py` has that by hand, and holds both to
within 3 %
of each other elsewhere, on clusters and plans at random.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from poplar.plan import Plan
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.prediction import predict
from poplar.profile import ClusterProfile
from poplar.simulator.rank_program import (
    PROGRAMMES,
    Action,
    Collective,
    Compute,
    Issue,
    Load,
    Senders,
    Work,
)
from poplar.simulator.timeline import Span, Timeline


def simulate(cluster: ClusterProfile, plan: Plan) -> Timeline:
    """One step of a plan on a measured cluster, unit by unit.

    Ranks whose passes and optimizer take the same time, and that all own something or all nothing,
    do the same at the same moment: they are simulated once, so thousands of ranks of a few kinds
    cost what these kinds cost.

    Raises:
        DoesNotFit: it needs more memory than a rank has, or a micro-batch that was not measured.
        ValueError: a plan for another number of ranks, or with units of their own strategy.
    """
    predict(cluster, plan)  # refuses what no rank could run
    costs = costs_of(cluster, plan)
    programme = PROGRAMMES[plan.stage]
    work = Work.of(costs, plan.shares)
    loads = _loads(costs, plan)
    simulated = {
        load: _Rank(programme(work, load).actions(), load.owns) for load in dict.fromkeys(loads)
    }
    _Simulation(simulated.values(), cluster.overlap).run()
    step = max(rank.ended for rank in simulated.values())
    spans = {load: tuple(rank.spans) for load, rank in simulated.items()}
    waiting = {load: step - _covered(spans[load]) for load in simulated}
    return Timeline(
        stage=plan.stage,
        devices=tuple(device.name for device in cluster.devices),
        step_seconds=step,
        spans=tuple(spans[load] for load in loads),
        busy_seconds=tuple(simulated[load].computed for load in loads),
        waiting_seconds=tuple(max(0.0, waiting[load]) for load in loads),
    )


def _loads(costs: StageCosts, plan: Plan) -> list[Load]:
    """What each rank has to do."""
    return [
        Load(
            passes=tuple(costs.pass_seconds(rank, batch) for batch in batches),
            optimizer=costs.optimizer_seconds(rank, share),
            owns=share > 0.0 or not costs.shares_matter,
        )
        for rank, (batches, share) in enumerate(zip(plan.micro_batches, plan.shares, strict=True))
    ]


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one stream runs something."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        if span.end > end:
            total += span.end - max(end, span.begin)
            end = span.end
    return total


class _Rank:
    """The two streams of one rank (of all that have the same load)."""

    __slots__ = (
        "actions",
        "began",
        "carried",
        "carrying",
        "compute",
        "computed",
        "ended",
        "issued",
        "left",
        "owns",
        "rate",
        "since",
        "spans",
        "version",
        "waits_for",
    )

    def __init__(self, actions: Iterator[Action], owns: bool) -> None:
        self.actions = actions
        self.owns = owns
        self.issued: list[int | None] = []
        """Of each collective, the pass that it belongs to here."""
        self.carried = 0
        """Collectives that are over."""
        self.carrying = False
        self.waits_for = -1
        """The compute stream stands still until this collective is over; -1: it does not."""
        self.compute: Compute | None = None
        """What the compute stream is doing: began then, `left` seconds of it at `since`."""
        self.began = self.left = self.since = 0.0
        self.rate = 1.0
        """Seconds of compute a second, whether anything is computed or not."""
        self.version = 0
        """Of the moment at which compute was expected to end: earlier ones are void."""
        self.computed = 0.0
        self.ended = 0.0
        self.spans: list[Span] = []


class _Gate:
    """Who has yet to issue a collective before it can begin."""

    __slots__ = ("collective", "missing", "missing_owners")

    def __init__(self, collective: Collective, ranks: int, owners: int) -> None:
        self.collective = collective
        self.missing, self.missing_owners = ranks, owners

    def is_open_for(self, rank: _Rank) -> bool:
        senders = self.collective.senders
        if senders is Senders.OWNERS:
            return self.missing_owners == 0
        return self.missing == 0 or (senders is Senders.EVERYONE_TO_OWNERS and not rank.owns)


class _Simulation:
    """A queue of moments: compute that ends on a rank, a collective that ends on some ranks.

    Simultaneous moments are played in the order in which they were foreseen, so a simulation is
    the same every time.
    """

    def __init__(self, ranks: Iterable[_Rank], overlap: float) -> None:
        self._ranks = list(ranks)
        self._owners = sum(rank.owns for rank in self._ranks)
        self._overlap = overlap
        self._gates: list[_Gate] = []
        self._order = itertools.count()
        self._moments: list[tuple[float, int, list[_Rank], int]] = []
        """When, a tie-breaker, who, and which version of a compute; -1: a collective is over."""

    def run(self) -> None:
        """From the beginning of a step to its end."""
        for rank in self._ranks:
            self._go_on(rank, 0.0)
        while self._moments:
            now, _, ranks, version = heapq.heappop(self._moments)
            if version < 0:
                self._end_collective(ranks, now)
            elif ranks[0].version == version:
                self._end_compute(ranks[0], now)
        assert not any(rank.waits_for >= 0 or rank.compute for rank in self._ranks)

    def _at(self, when: float, ranks: list[_Rank], version: int) -> None:
        heapq.heappush(self._moments, (when, next(self._order), ranks, version))

    # The compute stream

    def _go_on(self, rank: _Rank, now: float) -> None:
        """Follow the programme until it takes time."""
        for action in rank.actions:
            if isinstance(action, Issue):
                self._issue(rank, action, now)
            elif isinstance(action, Compute):
                if action.seconds > 0.0:
                    rank.compute, rank.left = action, action.seconds
                    rank.began = rank.since = now
                    self._expect_end(rank)
                    return
            elif action.number >= rank.carried:
                rank.waits_for = action.number
                return
        rank.ended = now

    def _expect_end(self, rank: _Rank) -> None:
        rank.version += 1
        if rank.rate > 0.0:
            self._at(rank.since + rank.left / rank.rate, [rank], rank.version)

    def _end_compute(self, rank: _Rank, now: float) -> None:
        done = rank.compute
        assert done is not None
        rank.compute = None
        rank.computed += done.seconds
        rank.spans.append(Span("compute", done.what, done.unit, done.pass_index, rank.began, now))
        self._go_on(rank, now)

    def _set_rate(self, rank: _Rank, rate: float, now: float) -> None:
        """From now on compute advances at another rate."""
        if rate == rank.rate:
            return
        if rank.compute is not None:
            rank.left = max(0.0, rank.left - (now - rank.since) * rank.rate)
            rank.since = now
        rank.rate = rate
        if rank.compute is not None:
            self._expect_end(rank)

    # The communication stream

    def _issue(self, rank: _Rank, action: Issue, now: float) -> None:
        number = len(rank.issued)
        rank.issued.append(action.pass_index)
        if number == len(self._gates):
            self._gates.append(_Gate(action.collective, len(self._ranks), self._owners))
        gate = self._gates[number]
        gate.missing -= 1
        gate.missing_owners -= rank.owns
        opens = gate.missing == 0 or (rank.owns and gate.missing_owners == 0)
        self._begin_collectives(self._ranks if opens else [rank], now)

    def _begin_collectives(self, ranks: Iterable[_Rank], now: float) -> None:
        """Whatever can begin on these ranks begins."""
        begun: dict[int, list[_Rank]] = {}
        for rank in ranks:
            number = rank.carried
            if rank.carrying or number >= len(rank.issued):
                continue
            gate = self._gates[number]
            if gate.is_open_for(rank):
                rank.carrying = True
                begun.setdefault(number, []).append(rank)
                if gate.collective.seconds > 0.0:
                    self._set_rate(rank, 0.0 if gate.collective.stops else self._overlap, now)
        for number, together in begun.items():
            self._at(now + self._gates[number].collective.seconds, together, -1)

    def _end_collective(self, ranks: list[_Rank], now: float) -> None:
        gate = self._gates[ranks[0].carried]
        what, unit, seconds = gate.collective[:3]
        spans: dict[int | None, Span] = {}  # one value for all ranks that call the pass the same
        for rank in ranks:
            index = rank.issued[rank.carried]
            if index not in spans:
                begin = now - seconds
                spans[index] = Span("communication", what, unit, index, begin, now)
            if seconds > 0.0:
                rank.spans.append(spans[index])
            rank.carrying = False
            rank.carried += 1
        self._begin_collectives(ranks, now)
        for rank in ranks:
            if not rank.carrying:
                self._set_rate(rank, 1.0, now)
            if 0 <= rank.waits_for < rank.carried:
                rank.waits_for = -1
                self._go_on(rank, now)
