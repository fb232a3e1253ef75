"""The closed form of a step: what its parts cost on a measured cluster.

In the words of a step: ranks compute until they *meet*, in a collective that the last of them
opens. With `T` the end of the last rank's compute since the previous meeting, `F` the earliest
moment at which all ranks have gradients of a unit to offer, and `k` the part of a collective that
does not belong to the unit that comes last,

    meet(c) = T + c - min(overlap * c k, T - F)

since compute advances at `overlap` of its speed while something travels: either all that could
hide does, or all the compute there was has run meanwhile. A collective of the forward (stage 3
gathers there) hides under the forward alone. Where every pass reduces and nothing is gathered,
what is left when a pass is over runs under the next one's forward. `itinerary` says what travels
when. Where ranks meet once a step, `T` is the largest sum of passes; where they meet at every
pass, the largest pass. What verification measured beyond that (residuals, by stage) is added; no
meeting costs less than the compute before it. `search` minimises what `predict` says, so both take
it from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product
from typing import NamedTuple, TypeVar

from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, STRATEGIES, Plan
from poplar.planner.collective_costs import CollectiveCosts
from poplar.planner.communication_schedule import CommunicationSchedule, schedules
from poplar.planner.memory_model import RankMemory, rank_memory
from poplar.planner.rank_groups import members
from poplar.profile import ClusterProfile

T = TypeVar("T")


class Synchronization(NamedTuple):
    """When the ranks' compute before a meeting ends, in seconds since the meeting before."""

    latest: float
    """`T`: the last rank's compute is over."""
    reducible: float
    """`F`: every rank's last backward has begun to leave gradients."""


class CommunicationSeconds(NamedTuple):
    """Seconds of the collectives over the whole model, under some shares; how often each of them
    is issued at a meeting is the stage's `Itinerary`.
    """

    gather: float
    """0 where meetings gather nothing."""
    reduce: float


class Exposure(NamedTuple):
    """A straight line in the traffic, which bounds what a meeting adds to its compute or hides."""

    gather: float
    reduce: float
    seconds: float

    def at(self, communication: CommunicationSeconds) -> float:
        """The line's value."""
        return (
            self.gather * communication.gather + self.reduce * communication.reduce + self.seconds
        )


_NOTHING = Exposure(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StageCosts:
    """The cost model of one cluster at one stage: what `predict` adds up and `search` minimises."""

    cluster: ClusterProfile
    stage: int
    persistent: frozenset[int] = frozenset()
    """Units that stay gathered between the passes of a step, where units are gathered."""

    @property
    def synchronizes_every_pass(self) -> bool:
        """Whether a pass ends in a meeting; otherwise ranks meet once a step."""
        return self.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS

    @property
    def shares_matter(self) -> bool:
        """Whether any state is sharded."""
        return self.stage >= 1

    @property
    def gathers_after_step(self) -> bool:
        """Whether new parameters travel once the optimizer is done (or with the next pass)."""
        return self.stage in (1, 2)

    @cached_property
    def schedules(self) -> tuple[CommunicationSchedule, CommunicationSchedule]:
        """What travels at a usual meeting of a step, and at its dearest."""
        return schedules(self.cluster.model, self.stage, self.persistent)

    @property
    def schedule(self) -> CommunicationSchedule:
        """What travels at the dearest meeting: the only one, if there is one."""
        return self.schedules[True]

    @cached_property
    def windows(self) -> tuple[list[tuple[float, float]], ...]:
        """For each itinerary: lines of which the least hides before gradients travel.

        Each a part of the gathers, whose windows they do not fill, and of the pass: of the windows
        that others do. Those that are filled first come first.
        """
        forward, backward = 1.0 - self.cluster.backward_fraction, self.cluster.backward_fraction
        found = []
        for way in self.schedules:
            windows = [
                (one.gathers, one.forward * forward + one.backward * backward)
                for one in way.windows
            ]
            windows.sort(key=lambda window: window[1] / window[0])
            found.append(
                [
                    (
                        sum(gathers for gathers, _ in windows[filled:]),
                        sum(length for _, length in windows[:filled]),
                    )
                    for filled in range(len(windows) + 1)
                ]
            )
        return tuple(found)

    @property
    def late(self) -> float:
        """The part of a pass, from its end, in which it has gradients to offer."""
        return self.cluster.backward_fraction * (1.0 - self.schedule.turn)

    @property
    def hides(self) -> bool:
        """Whether any communication runs under compute."""
        return min(self.late, self.cluster.overlap) > 0.0

    @property
    def synchronizations_differ(self) -> bool:
        """Whether one meeting of a step is dearer than the others."""
        usual, dearest = self.schedules
        return usual.gathers < dearest.gathers or (
            self.cluster.overlap > 0.0 and usual.reductions_behind > 0.0
        )

    def parted(self, items: Sequence[T]) -> tuple[Sequence[T], T]:
        """The usual meetings of a step, and the dearest: `joined` the other way."""
        return (items[1:], items[0]) if self._dearest_comes_first else (items[:-1], items[-1])

    def joined(self, usual: Sequence[T], dearest: T) -> tuple[T, ...]:
        """A step's meetings in order."""
        return (dearest, *usual) if self._dearest_comes_first else (*usual, dearest)

    @property
    def _dearest_comes_first(self) -> bool:
        return bool(self.persistent)

    @cached_property
    def collectives(self) -> CollectiveCosts:
        """`R(p)` and `G(p)`."""
        return CollectiveCosts.of(self.cluster.network)

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """By rank."""
        kinds = self.cluster.device_kinds
        first = [ranks[0] for ranks in members(kinds)]
        memories = [rank_memory(self.cluster, self.stage, rank, self.persistent) for rank in first]
        return tuple(memories[kind] for kind in kinds)

    @property
    def synchronization_residual(self) -> float:
        """What was measured of a meeting beyond its collectives."""
        return self.cluster.network.synchronization_seconds[self.stage]

    def pass_seconds(self, rank: int, batch: int) -> float:
        """`x(batch)`: one pass of this rank in the engine; 0 without samples."""
        if batch == 0:
            return 0.0
        device = self.cluster.devices[rank]
        return max(0.0, device.seconds(batch) + device.pass_overhead_seconds[self.stage])

    def optimizer_seconds(self, rank: int, share: float) -> float:
        """The optimizer on a share, and what else this rank does once a step; may be negative."""
        device = self.cluster.devices[rank]
        owned = share if self.shares_matter else 1.0
        return device.optimizer_step_seconds(owned) + device.step_overhead_seconds[self.stage]

    def communication(self, shares: Sequence[float]) -> CommunicationSeconds:
        """What travels at every meeting."""
        cut = shares if self.shares_matter else (1.0 / len(shares),) * len(shares)
        gathered = self._gather_seconds(cut) if self.schedule.gathers else 0.0
        return CommunicationSeconds(gathered, self._reduce_seconds(cut))

    def synchronization_seconds(
        self,
        synchronization: Synchronization,
        communication: CommunicationSeconds,
        *,
        dearest: bool = True,
    ) -> float:
        """From the meeting before to the end of this one.

        Args:
            meeting: when compute ends.
            traffic: what travels.
            dearest: of the step's meetings, as `itineraries` says.
        """
        latest, reducible = synchronization
        gather, reduce = communication
        way, overlap = self.schedules[dearest], self.cluster.overlap
        shown = way.gathers * gather + reduce + self.synchronization_residual
        if overlap:
            if gather:
                shown -= min(
                    overlap * part * gather + length * latest
                    for part, length in self.windows[dearest]
                )
            backward = latest - reducible
            behind = way.gathers_under_backward * gather + way.reductions_under_backward * reduce
            if not way.reductions_behind:
                hidden = min(overlap * behind, backward)
                for gathers, reductions, after in way.cuts:
                    left = overlap * (gathers * gather + reductions * reduce)
                    hidden = min(
                        hidden, left + backward - self.cluster.backward_fraction * after * latest
                    )
                shown -= hidden
                if way.forward_after:
                    forward = (1.0 - self.cluster.backward_fraction) * way.forward_after * latest
                    shown -= min(overlap * way.reductions_left * reduce, forward)
            else:
                shown -= min(
                    overlap * reduce,
                    overlap * behind + reducible,
                    overlap * way.reductions_behind * reduce + backward,
                    latest,
                )
        return latest + max(0.0, shown)

    def exposures(
        self, synchronization: Synchronization, *, dearest: bool = True
    ) -> list[Exposure]:
        """The lines whose largest, where it is positive, `meeting_seconds` adds to `latest`."""
        gathers, residual = self.schedules[dearest].gathers, self.synchronization_residual
        forwards, backwards = self._hidden(synchronization, dearest)
        return [
            Exposure(
                gathers - forward.gather - backward.gather,
                1.0 - forward.reduce - backward.reduce,
                residual - forward.seconds - backward.seconds,
            )
            for forward in forwards
            for backward in backwards
        ]

    def slopes(
        self,
        synchronization: Synchronization,
        communication: CommunicationSeconds,
        *,
        dearest: bool = True,
    ) -> CommunicationSeconds:
        """By how much a meeting grows with each part of the traffic, as it grows from here."""
        forward, backward = (
            min(lines, key=lambda line: line.at(communication))
            for lines in self._hidden(synchronization, dearest)
        )
        gather = self.schedules[dearest].gathers - forward.gather - backward.gather
        reduce = 1.0 - forward.reduce - backward.reduce
        seconds = self.synchronization_residual - forward.seconds - backward.seconds
        if Exposure(gather, reduce, seconds).at(communication) <= 0.0:
            return CommunicationSeconds(0.0, 0.0)
        return CommunicationSeconds(gather, reduce)

    def _hidden(
        self, synchronization: Synchronization, dearest: bool
    ) -> tuple[list[Exposure], list[Exposure]]:
        """Under the forward, and under the backward and what follows: the least of these lines."""
        way, overlap = self.schedules[dearest], self.cluster.overlap
        latest, reducible = synchronization
        if not overlap:
            return [_NOTHING], [_NOTHING]
        forwards = [
            Exposure(overlap * gathers, 0.0, length * latest)
            for gathers, length in self.windows[dearest]
        ]
        backward, part = latest - reducible, overlap * way.reductions_under_backward
        if way.reductions_behind:
            return forwards, [
                Exposure(0.0, overlap, 0.0),
                Exposure(0.0, part, reducible),
                Exposure(0.0, overlap * way.reductions_behind, backward),
                Exposure(0.0, 0.0, latest),
            ]
        backwards = [
            Exposure(overlap * way.gathers_under_backward, part, 0.0),
            Exposure(0.0, 0.0, backward),
        ]
        for gathers, reductions, after in way.cuts:
            over = backward - self.cluster.backward_fraction * after * latest
            backwards.append(Exposure(overlap * gathers, overlap * reductions, over))
        if way.forward_after:
            forward = (1.0 - self.cluster.backward_fraction) * way.forward_after * latest
            following = (
                Exposure(0.0, overlap * way.reductions_left, 0.0),
                Exposure(0.0, 0.0, forward),
            )
            backwards = [
                Exposure(*map(sum, zip(*pair, strict=True)))
                for pair in product(backwards, following)
            ]
        return forwards, backwards

    def met_seconds(
        self, synchronizations: Sequence[Synchronization], communication: CommunicationSeconds
    ) -> list[float]:
        """Of each of a step's meetings, in order."""
        usual, dearest = self.parted(synchronizations)
        return list(
            self.joined(
                [
                    self.synchronization_seconds(synchronization, communication, dearest=False)
                    for synchronization in usual
                ],
                self.synchronization_seconds(dearest, communication),
            )
        )

    def tail_seconds(self, shares: Sequence[float]) -> float:
        """What follows the last meeting: the optimizer, and the gather of what it changed."""
        ranks = self._different(shares)
        slowest = max(self.optimizer_seconds(rank, shares[rank]) for rank in ranks)
        residual = self.cluster.network.step_seconds[self.stage]
        return max(0.0, slowest + self.gather_after_step_seconds(shares) + residual)

    def gather_after_step_seconds(self, shares: Sequence[float]) -> float:
        """The gather after the optimizer, where there is one."""
        return self._gather_seconds(shares) if self.gathers_after_step else 0.0

    def _reduce_seconds(self, shares: Sequence[float]) -> float:
        return self.collectives.reduce_scatter.seconds(shares, self._different(shares))

    def _gather_seconds(self, shares: Sequence[float]) -> float:
        return self.collectives.all_gather.seconds(shares, self._different(shares))

    def _different(self, shares: Sequence[float]) -> list[int]:
        """Of ranks that are equal and own as much, one."""
        asked = tuple(shares)
        if asked not in self._last_different:
            kinds = zip(self.cluster.rank_kinds, asked, strict=True)
            self._last_different.clear()
            self._last_different[asked] = list(dict(zip(kinds, count(), strict=False)).values())
        return self._last_different[asked]

    @cached_property
    def _last_different(self) -> dict[tuple[float, ...], list[int]]:
        """For the shares that were asked for last: every collective asks, and the optimizer."""
        return {}

    def synchronizations(self, micro_batches: Sequence[Sequence[int]]) -> list[Synchronization]:
        """Every meeting of a step."""
        kinds = zip(self.cluster.device_kinds, micro_batches, strict=True)
        alike = {kind: rank for rank, kind in enumerate(kinds)}
        ranks, rows = list(alike.values()), [passes for _, passes in alike]
        if self.synchronizes_every_pass:
            columns = zip(*rows, strict=True)
            return [
                self.synchronization(
                    (rank, (batch,)) for rank, batch in zip(ranks, column, strict=True)
                )
                for column in columns
            ]
        return [self.synchronization(zip(ranks, rows, strict=True))]

    def step_seconds(
        self, micro_batches: Sequence[Sequence[int]], shares: Sequence[float]
    ) -> float:
        """A whole step."""
        met = self.met_seconds(self.synchronizations(micro_batches), self.communication(shares))
        return math.fsum(met) + self.tail_seconds(shares)

    def synchronization(self, passes_of: Iterable[tuple[int, Sequence[int]]]) -> Synchronization:
        """The meeting after these ranks have run these passes; of equal ones, one will do."""
        latest = reducible = 0.0
        for rank, own in passes_of:
            passes = [self.pass_seconds(rank, batch) for batch in own if batch]
            end = math.fsum(passes)
            latest = max(latest, end)
            reducible = max(reducible, end - self.late * passes[-1] if passes else 0.0)
        return Synchronization(latest, reducible)


def costs_of(cluster: ClusterProfile, plan: Plan) -> StageCosts:
    """The costs that this plan has.

    Raises:
        ValueError: a plan for another number of ranks, or with units of their own strategy, or that
            keeps units which the profile does not know.
    """
    if plan.world_size != cluster.world_size:
        raise ValueError(
            f"a plan for {plan.world_size} ranks, but the profile is of {cluster.world_size}; "
            "measure the ranks that will train"
        )
    known = {name: unit for unit, name in enumerate(cluster.model.unit_names)}
    for unit in plan.units:
        uniform = unit.strategy == STRATEGIES[plan.stage] and unit.shares in (None, plan.shares)
        if not uniform or unit.transport is not None:
            raise ValueError(
                f"unit {unit.name!r} has a plan of its own; the cost model knows plans whose units "
                "all follow the stage: leave Plan.units empty, or let it say keep_gathered alone"
            )
        if unit.name not in known and (known or unit.keep_gathered):
            raise ValueError(
                f"the plan names unit {unit.name!r}, which the profile does not know; known are "
                f"{', '.join(known) or 'none: profile again'}"
            )
    persistent = frozenset(known[unit.name] for unit in plan.units if unit.keep_gathered)
    return StageCosts(cluster, plan.stage, persistent)
