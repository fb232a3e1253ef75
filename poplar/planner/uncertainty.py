"""What a plan rests on that nobody has measured, and the one more point that would settle it.

A curve is sure at its points, and between them as far as `curve` says. Most of that does not
matter: a doubt does if, at an interval's end, another plan would be faster than the chosen one. So
the planner itself tries the ends, in a handful of searches:

- batches of the plan that were never measured, one at a time, at both ends;
- everything at its lower end at once, which tells where else a faster plan might be;
- everything at its upper end at once, for the plan that is safest (`safest`).

Not looked at: memory (peaks never exceed those of the next larger measured batch), batches beyond
the largest that was measured, the network and the optimizer, and two planned batches of which only
both together would change the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from poplar.formatting import format_ranks
from poplar.plan import Plan
from poplar.planner.cost_model import costs_of
from poplar.planner.device_groups import DeviceGroup, device_groups, with_equal_devices
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import DoesNotFit, predict
from poplar.planner.search import search
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile

TOLERANCE = 0.02
"""What may stay open, as a part of a step: trials decide between plans as close as that. At half of
it, curves without any steps were asked about twice as often, because of their noise."""
_TRIED = 4
"""Planned batches whose ends are searched on: those that change the step most."""
_LUCK = 0.5
"""By this part counts what is at stake in a plan that is faster only if many passes take the least
possible at once: on random clusters, with and without steps, that asked less, settled as much."""
_WITH_NOISE = 32
"""Of more ranks, those that are alike are taken as equal, so that searches count kinds; what is in
doubt is then the plan of these."""
_PER_STRETCH = 16
"""Batches that are looked at between two points; all of them, if there are no more."""
_LEAST = 1e-3
"""Of a pass, in place of nothing, where noise leaves its lower end at 0."""

_LOW, _HIGH = 0, 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """One more point to measure."""

    ranks: tuple[int, ...]
    """Whose; their devices are alike, so they measure it together."""
    device: str
    """What a person calls these devices."""
    batch: int
    seconds: tuple[float, float]
    """Between which values a pass of the first of these ranks lies, by what was measured so far."""
    stake: float
    """How much faster than the plan another may turn out to be, as a part of the plan's step."""
    planned: bool
    """Whether the plan has this batch; otherwise another one has, which may be faster."""

    def __str__(self) -> str:
        low, high = self.seconds
        why = "the plan has it, and another" if self.planned else "a plan that has it"
        return (
            f"{self.batch} samples on {format_ranks(self.ranks)} ({self.device}) take "
            f"between {low:.3g} and {high:.3g} s by the points around them; {why} may be "
            f"{100 * self.stake:.1f} % faster"
        )


def asks_for(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] = (),
    tolerance: float = TOLERANCE,
) -> Question | None:
    """The one more point that would do most to settle which plan is the fastest; None: settled.

    Args:
        cluster: what was measured so far.
        plan: chosen on it by policy "exact".
        stages: of the plans that it is compared with, beside its own.
        tolerance: part of a step by which another plan may be faster without a question.

    Returns:
        The same for the same arguments: all ranks that hold them agree.

    Raises:
        DoesNotFit, ValueError: as `predict`, of a plan that this cluster cannot run.
        ValueError: a tolerance that is negative or not finite.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0.0):
        raise ValueError(f"tolerance must be finite and 0 or more, got {tolerance}")
    first = next(iter(doubts(cluster, plan, stages=stages)), None)
    return first if first is not None and first.stake > tolerance else None


def doubts(
    cluster: ClusterProfile, plan: Plan, *, stages: Sequence[int] = ()
) -> tuple[Question, ...]:
    """For each kind of devices the point that matters most, if any; most at stake first.

    Where some ranks measure the first of these, the others have to compute as well, so that what is
    shared is shared: they may as well answer their own. Arguments and errors are those of
    `asks_for`, which takes the first one.
    """
    found = _Doubts(cluster, plan, stages)
    foremost: dict[DeviceGroup, tuple[float, _Asked, bool]] = {}
    for stake, asked, planned in [*found.of_the_plan(), *found.of_a_lucky_plan()]:
        known = foremost.get(asked.kind)
        if known is None or stake > known[0]:
            foremost[asked.kind] = stake, asked, planned
    ordered = sorted(foremost.values(), key=lambda one: one[0], reverse=True)
    return tuple(
        Question(
            ranks=asked.kind.ranks,
            device=asked.kind.device,
            batch=asked.batch,
            seconds=cluster.devices[asked.kind.ranks[0]].seconds_within(asked.batch),
            stake=stake,
            planned=planned,
        )
        for stake, asked, planned in ordered
    )


def safest(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] = (),
    tolerance: float = TOLERANCE,
) -> Plan:
    """The plan that is the fastest if every pass takes the most possible.

    It keeps to batches that were measured, or that can be no worse than thought. If it saves no
    more than `tolerance` even then, it is the given plan itself. Another one has no prediction.
    Arguments and errors are those of `asks_for`.
    """
    found = _Doubts(cluster, plan, stages)
    unlucky = found.everything_at(_HIGH)
    other = found.fastest(unlucky)
    if found.lost(unlucky, other) <= tolerance:
        return plan
    try:
        predict(cluster, other)
    except DoesNotFit:  # of many ranks the alike ones were taken as equal
        return plan
    return replace(other, prediction=None)


class _Asked(NamedTuple):
    """A batch on alike ranks."""

    kind: DeviceGroup
    batch: int


_Stake = tuple[float, _Asked, bool]
"""How much is at stake, in which batch, and whether the plan has it."""


class _Doubts:
    """Of one plan."""

    def __init__(self, cluster: ClusterProfile, plan: Plan, stages: Sequence[int]) -> None:
        predict(cluster, plan)  # raises where the cluster cannot run it
        self.cluster, self.plan = cluster, plan
        self.stages = tuple(sorted({plan.stage, *stages}))
        self.kinds = device_groups(cluster)
        if cluster.world_size > _WITH_NOISE:
            equal = with_equal_devices(cluster, self.kinds)
            with suppress(NoPlanFits):  # a kind has the least memory of its ranks
                self.plan = self.fastest(equal)
                self.cluster = equal
        self.unmeasured = self._unmeasured(self.plan)

    def of_the_plan(self) -> list[_Stake]:
        """Batches of the plan, one at a time, at both ends."""
        usual = predict(self.cluster, self.plan).step_seconds
        effects = []
        for asked in self.unmeasured:
            ends = [self._at(asked, end) for end in (_LOW, _HIGH)]
            steps = [predict(cluster, self.plan).step_seconds for cluster in ends]
            effects.append((max(abs(step - usual) for step in steps), asked, ends))
        effects.sort(key=lambda effect: effect[0], reverse=True)
        tried = [
            (max(self.lost(cluster, self.fastest(cluster)) for cluster in ends), asked, True)
            for effect, asked, ends in effects[:_TRIED]
            if effect > 0.0
        ]
        known = {asked for _, asked, _ in tried}
        return tried + [(0.0, asked, True) for asked in self.unmeasured if asked not in known]

    def of_a_lucky_plan(self) -> list[_Stake]:
        """Batches of the plan that would be the fastest if every pass took the least possible."""
        lucky = self.everything_at(_LOW)
        other = self.fastest(lucky)
        stake = _LUCK * self.lost(lucky, other)
        gained = {asked: self._gained(asked, lucky, other) for asked in self._unmeasured(other)}
        most = max(gained.values(), default=0.0)
        return [
            (stake * gain / most, asked, asked in self.unmeasured)
            for asked, gain in gained.items()
            if gain > 0.0
        ]

    def everything_at(self, end: int) -> ClusterProfile:
        """The cluster if every pass took what is at this end of its interval."""
        cluster = self.cluster
        for kind in self.kinds:
            devices = self._devices(kind, lambda device: _at_end(device, end, _looked_at(device)))
            cluster = _with_devices(cluster, devices)
        return cluster

    def fastest(self, cluster: ClusterProfile) -> Plan:
        """The plan that would be chosen if this were the truth."""
        return search(cluster, global_batch=self.plan.global_batch, stages=self.stages)

    def lost(self, cluster: ClusterProfile, other: Plan) -> float:
        """By which part of its step the plan is slower than another, if this were the truth."""
        fastest = predict(cluster, other).step_seconds
        return 1.0 - fastest / predict(cluster, self.plan).step_seconds

    def _at(self, asked: _Asked, end: int) -> ClusterProfile:
        devices = self._devices(asked.kind, lambda device: _at_end(device, end, [asked.batch]))
        return _with_devices(self.cluster, devices)

    def _unmeasured(self, plan: Plan) -> tuple[_Asked, ...]:
        """What some rank has in this plan and has not measured."""
        found: dict[_Asked, None] = {}
        for kind in self.kinds:
            for rank in kind.ranks:
                measured = {point.batch for point in self.cluster.devices[rank].points}
                for batch in sorted(set(plan.micro_batches[rank]) - measured - {0}):
                    found[_Asked(kind, batch)] = None
        return tuple(found)

    def _gained(self, asked: _Asked, lucky: ClusterProfile, plan: Plan) -> float:
        """What a step gains by the luck of these ranks, as far as that is at this batch."""
        ranks, device = asked.kind.ranks, self.cluster.devices[asked.kind.ranks[0]]
        usual = _with_devices(lucky, {rank: self.cluster.devices[rank] for rank in ranks})
        # Whether it fits is not asked: bytes at the lucky ends are rounded.
        without, with_luck = (
            costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)
            for cluster in (usual, lucky)
        )
        gain = without - with_luck

        def luck(batch: int) -> float:
            return device.seconds(batch) - device.seconds_within(batch)[_LOW] if batch else 0.0

        passes = [batch for rank in ranks for batch in plan.micro_batches[rank]]
        here = passes.count(asked.batch) * luck(asked.batch)
        return gain * here / sum(map(luck, passes)) if here > 0.0 else 0.0

    def _devices(
        self, kind: DeviceGroup, change: Callable[[DeviceProfile], DeviceProfile]
    ) -> dict[int, DeviceProfile]:
        """By rank of a kind, its device changed; equal ones stay equal."""
        numbers = self.cluster.device_kinds
        changed: dict[int, DeviceProfile] = {}
        for rank in kind.ranks:
            if numbers[rank] not in changed:
                changed[numbers[rank]] = change(self.cluster.devices[rank])
        return {rank: changed[numbers[rank]] for rank in kind.ranks}


def _with_devices(cluster: ClusterProfile, devices: Mapping[int, DeviceProfile]) -> ClusterProfile:
    own = enumerate(cluster.devices)
    return replace(cluster, devices=tuple(devices.get(rank, device) for rank, device in own))


def _at_end(device: DeviceProfile, end: int, batches: Iterable[int]) -> DeviceProfile:
    """The device if passes of these batches took what is at this end of their intervals."""
    points = {point.batch: point for point in device.points}
    for batch in batches:
        if batch <= device.max_batch:
            seconds = device.seconds_within(batch)[end]
            points[batch] = BatchPoint(
                batch=batch,
                seconds=max(seconds, _LEAST * device.seconds(batch)),
                activation_bytes=math.floor(device.activation_bytes(batch)),
            )
    return replace(device, points=tuple(points[batch] for batch in sorted(points)))


def _looked_at(device: DeviceProfile) -> list[int]:
    """The measured batches, and some between them."""
    return [
        batch
        for begin, end in pairwise([0, *(point.batch for point in device.points)])
        for batch in range(end, begin, -max(1, (end - begin) // _PER_STRETCH))
    ]
