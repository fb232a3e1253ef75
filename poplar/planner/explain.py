"""Why a step takes as long as it does, what would make it shorter, and what each device adds.

Every answer is a new search on a cluster that differs in one respect (`what_if`), so it includes
that batches and shares change as well. Devices of one group (`device_groups`) change together: a
thousand ranks in three groups take as many searches as three ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poplar.formatting import format_bytes
from poplar.plan import Plan
from poplar.planner import what_if
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.device_groups import DeviceGroup, device_groups, with_equal_devices
from poplar.planner.explanation import (
    NEEDED,
    NOT_WORTH_IT,
    WORTH_IT,
    Bottleneck,
    Change,
    Contribution,
    Explanation,
)
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import DoesNotFit, bound_of, predict
from poplar.planner.search import ALL_STAGES, search
from poplar.planner.simple_plans import PREFERENCE
from poplar.profile import ClusterProfile

PREDICTION_ERROR = 0.04
"""Default error of a predicted step, as a fraction; see the benchmark of predictions."""
NOISE = PREFERENCE
"""Smaller gains are not reported: a search may return a plan that is slower by as much."""

_MORE_MEMORY = 0.25
_FASTER_DEVICE = 1.25
_FASTER_NETWORK = 2.0
_LARGER_BATCHES = 2
_MAX_UNEQUAL_RANKS = 32
"""With more ranks, devices of one group are planned as equal."""
_SHORTEST_STEP = 1e-12
_GAP = 4
"""Measured batches more than this factor apart leave a gap in the profile; twice is usual."""


def explain(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] = ALL_STAGES,
    max_micro_batch: int | None = None,
    error: float = PREDICTION_ERROR,
) -> Explanation:
    """Find what bounds a plan, what would help most, and what each group of devices adds.

    Args:
        cluster: what was measured.
        plan: for this cluster. Other plans are searched for the same global batch.
        stages: ZeRO stages that other plans may have.
        max_micro_batch: most samples of one pass in other plans; None: what was measured.
        error: relative error of a predicted step, from 0 to below 1. Smaller gains are not worth
            it.

    Raises:
        DoesNotFit: the plan needs more memory than there is, or batches that were not measured.
        ValueError: a plan for another cluster, or arguments out of range.
    """
    if not (math.isfinite(error) and 0.0 <= error < 1.0):
        raise ValueError(f"error must be a fraction of a step from 0 to below 1, got {error}")
    prediction = predict(cluster, plan)
    groups = device_groups(cluster)
    judged, step = cluster, prediction.step_seconds
    if cluster.world_size > _MAX_UNEQUAL_RANKS:
        judged = with_equal_devices(cluster, groups)
        step = _step_seconds(judged, plan, default=step)
    questions = _Questions(judged, groups, plan.global_batch, stages, max_micro_batch)
    best = questions.fastest(judged)
    fastest = step if best is None else min(step, best.seconds)
    noise = NOISE if best is None else max(NOISE, best.optimality_gap)
    faster_plan = _gain(step, fastest)
    # On the cluster as measured, where the plan was predicted.
    even = questions.fastest(cluster, policy="even")
    over_even = None if even is None else _gain(even.seconds, prediction.step_seconds)
    return Explanation(
        step_seconds=prediction.step_seconds,
        error=error,
        bound=_bottleneck(cluster, plan),
        faster_plan=faster_plan if faster_plan > noise else 0.0,
        over_even=over_even,
        verdict=NEEDED if over_even is None else _verdict(over_even, error),
        changes=tuple(
            sorted(
                (change for change in questions.changes(fastest) if change.gain > noise),
                key=lambda change: -change.gain,
            )
        ),
        contributions=tuple(
            sorted(questions.contributions(fastest, error), key=_least_valuable_first)
        ),
        doubts=tuple(_gaps_in_the_profile(cluster, plan)),
    )


class _Step(NamedTuple):
    """The step of the fastest plan on some cluster."""

    seconds: float
    optimality_gap: float
    stage: int


class _Changed(NamedTuple):
    """A cluster that differs in one respect."""

    cluster: ClusterProfile
    what: str
    amount: str
    group: DeviceGroup = DeviceGroup("", ())
    """Whose device or memory changed; empty: something that all ranks share."""


@dataclass(frozen=True)
class _Questions:
    """Searches for the same global batch on one changed cluster after another."""

    cluster: ClusterProfile
    groups: Sequence[DeviceGroup]
    global_batch: int
    stages: Sequence[int]
    max_micro_batch: int | None

    def fastest(self, cluster: ClusterProfile, policy: str = "exact") -> _Step | None:
        """The fastest step on a cluster; None: no plan fits."""
        try:
            plan = search(
                cluster,
                global_batch=self.global_batch,
                stages=self.stages,
                policy=policy,
                max_micro_batch=self.max_micro_batch,
            )
        except NoPlanFits:
            return None
        prediction = plan.prediction or {}
        return _Step(prediction["step_seconds"], prediction["optimality_gap"] or 0.0, plan.stage)

    def changes(self, seconds: float) -> Iterator[Change]:
        """What each change gains over a step of `seconds`."""
        for changed in (*self._faster_devices(), *self._better_network()):
            yield from self._gains(changed, seconds)
        base = self.cluster
        if any(device.max_batch < self._largest_batch for device in base.devices):
            # More memory helps where larger batches than measured ones may fit.
            base = what_if.with_larger_batches(base, _LARGER_BATCHES)
            amount = "twice the largest measured (profile with a larger max_batch)"
            for change in self._gains(_Changed(base, "batches", amount), seconds):
                if change.gain > 0.0:
                    seconds /= 1.0 + change.gain
                    yield change
        for changed in self._more_memory(base):
            yield from self._gains(changed, seconds)

    def contributions(self, seconds: float, error: float) -> Iterator[Contribution]:
        """What each group adds; if all ranks are in one group, what one rank adds."""
        if self.cluster.world_size == 1:
            return
        for group in self.groups:
            ranks = group.ranks if len(self.groups) > 1 else group.ranks[-1:]
            step = self.fastest(what_if.without(self.cluster, ranks))
            without = None if step is None else _gain(seconds, step.seconds)
            yield Contribution(
                ranks=ranks,
                device=group.device,
                without=without,
                verdict=NEEDED if without is None else _verdict(-without, error),
            )

    def _faster_devices(self) -> Iterator[_Changed]:
        amount = f"{100 * _FASTER_DEVICE - 100:.0f} % faster"
        for group in self.groups:
            faster = what_if.with_faster_devices(self.cluster, group.ranks, _FASTER_DEVICE)
            yield _Changed(faster, "device", amount, group)

    def _better_network(self) -> Iterator[_Changed]:
        cluster, network = self.cluster, self.cluster.network
        if cluster.world_size == 1:
            return
        if network.reduce_scatter_seconds + network.all_gather_seconds > 0.0:
            faster = what_if.with_faster_network(cluster, _FASTER_NETWORK)
            yield _Changed(faster, "network", "twice as fast")
            if cluster.overlap < 1.0:
                overlapped = what_if.with_overlap(cluster, 1.0)
                yield _Changed(overlapped, "overlap", f"{cluster.overlap:.2f} to 1")

    def _more_memory(self, base: ClusterProfile) -> Iterator[_Changed]:
        for group in self.groups:
            if not self._memory_binds(base, group.ranks[0]):
                continue
            added = {
                rank: round(_MORE_MEMORY * base.devices[rank].memory_bytes) for rank in group.ranks
            }
            each = " each" if len(group.ranks) > 1 else ""
            amount = f"+{format_bytes(added[group.ranks[0]])}{each}"
            yield _Changed(what_if.with_memory(base, added), "memory", amount, group)

    def _gains(self, changed: _Changed, seconds: float) -> Iterator[Change]:
        step = self.fastest(changed.cluster)
        if step is not None:
            yield Change(
                what=changed.what,
                ranks=changed.group.ranks,
                device=changed.group.device,
                amount=changed.amount,
                gain=_gain(seconds, step.seconds),
                stage=step.stage,
            )

    @property
    def _largest_batch(self) -> int:
        """The largest micro-batch that a plan may have."""
        limit = self.max_micro_batch
        return self.global_batch if limit is None else min(limit, self.global_batch)

    def _memory_binds(self, cluster: ClusterProfile, rank: int) -> bool:
        """Whether this rank cannot hold the largest batch with the whole state at some stage."""
        batch = min(self._largest_batch, cluster.devices[rank].max_batch)
        memories = (StageCosts(cluster, stage).memories[rank] for stage in self.stages)
        return any(not memory.fits(batch, 1.0) for memory in memories)


def _bottleneck(cluster: ClusterProfile, plan: Plan) -> Bottleneck:
    prediction = predict(cluster, plan)
    exposed = prediction.communication_seconds / max(prediction.step_seconds, _SHORTEST_STEP)
    bound = bound_of(costs_of(cluster, plan), plan, prediction.busy_fraction, exposed)
    return Bottleneck(what=bound.what, rank=bound.rank, sentence=bound.sentence)


def _step_seconds(cluster: ClusterProfile, plan: Plan, *, default: float) -> float:
    try:
        return predict(cluster, plan).step_seconds
    except DoesNotFit:
        return default


def _gain(before: float, after: float) -> float:
    """By which fraction samples per second grow if a step takes `after` instead of `before`."""
    return before / max(after, _SHORTEST_STEP) - 1.0


def _verdict(gain: float, error: float) -> str:
    return WORTH_IT if gain > error else NOT_WORTH_IT


def _least_valuable_first(contribution: Contribution) -> float:
    return math.inf if contribution.without is None else -contribution.without


def _gaps_in_the_profile(cluster: ClusterProfile, plan: Plan) -> Iterator[str]:
    """One sentence per device name and gap for batches of the plan that are far from measured."""
    reported = set()
    for rank, passes in enumerate(plan.micro_batches):
        device = cluster.devices[rank]
        measured = [0, *(point.batch for point in device.points)]
        for batch in sorted(set(passes).difference(measured)):
            below = max(other for other in measured if other < batch)
            above = min((other for other in measured if other > batch), default=0)
            if above > _GAP * max(1, below) and (device.name, below, above) not in reported:
                reported.add((device.name, below, above))
                yield (
                    f"rank {rank} ({device.name}) runs {batch} samples, but nothing was measured "
                    f"between {below} and {above}"
                )
