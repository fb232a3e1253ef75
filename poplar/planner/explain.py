"""Why a step takes as long as it does, what would make it shorter, and which ranks are worth it.

Answers come from planning again on a cluster that differs in one thing (`what_if`), so they count
that batches and shares move with it. Devices that are alike are one kind and change together: a
thousand ranks of three kinds take as many searches as three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from poplar.formatting import format_bytes
from poplar.plan import Plan
from poplar.planner import what_if
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.device_groups import Kind, alike_kinds, without_noise
from poplar.planner.explanation import (
    NEEDED,
    NOT_WORTH_IT,
    WORTH_IT,
    Bottleneck,
    Change,
    Contribution,
    Explanation,
)
from poplar.planner.prediction import DoesNotFit, bound_of, predict
from poplar.planner.search import ALL_STAGES, plans_by_stage
from poplar.profile import ClusterProfile

PREDICTION_ERROR = 0.04
"""Of a step, as a fraction, where nobody knows better: see the benchmark of predictions."""
NOISE = 0.01
"""Gains below are not told: measured curves are no better than that."""

_MORE_MEMORY = 0.25
_FASTER_DEVICE = 1.25
_FASTER_NETWORK = 2.0
_LARGER_BATCHES = 2
_MOST_UNEQUAL = 32
"""Ranks that are planned with the noise between them; of more, those that are alike are equal."""
_SHORTEST_STEP = 1e-12
_HOLE = 4
"""Batches that lie so many times apart leave a hole between them: twice is usual."""


def explain(
    cluster: ClusterProfile,
    plan: Plan,
    *,
    stages: Sequence[int] = ALL_STAGES,
    max_micro_batch: int | None = None,
    error: float = PREDICTION_ERROR,
) -> Explanation:
    """What bounds a plan, what would help most, and what it and each kind of device gain.

    Args:
        cluster: what was measured.
        plan: for this cluster; what is planned in its place has its global batch.
        stages: ZeRO stages that other plans may have.
        max_micro_batch: most samples of one pass in other plans; None: what was measured.
        error: part of a predicted step that it may be off by, from 0 to below 1.

    Raises:
        DoesNotFit: the plan needs more memory than there is, or batches that were not measured.
        ValueError: a plan of another cluster, or arguments that cannot be.
    """
    if not (math.isfinite(error) and 0.0 <= error < 1.0):
        raise ValueError(f"error is a part of a step, 0 or more and below 1, got {error}")
    prediction = predict(cluster, plan)
    costs = costs_of(cluster, plan)
    exposed = prediction.communication_seconds / max(prediction.step_seconds, _SHORTEST_STEP)
    bound = bound_of(costs, plan, prediction.busy_fraction, exposed)
    found = alike_kinds(cluster)
    step = prediction.step_seconds
    judged = cluster
    if cluster.world_size > _MOST_UNEQUAL:
        judged = without_noise(cluster, found)
        step = _step_on(judged, plan, step)
    asked = _Planner(judged, plan.global_batch, stages, max_micro_batch)
    best = asked.step_on(judged)
    fastest = step if best is None else min(step, best.seconds)
    # Of the plan as it is, noise and all: what it makes of it is what it is worth.
    even = asked.step_on(cluster, policy="even")
    over_even = None if even is None else _gain(even.seconds, prediction.step_seconds)
    noise = max(NOISE, 0.0 if best is None else best.gap)
    changes = [change for change in asked.changes(found, fastest) if change.gain > noise]
    contributions = asked.contributions(found, fastest, error)
    return Explanation(
        step_seconds=prediction.step_seconds,
        error=error,
        bound=Bottleneck(what=bound.what, rank=bound.rank, sentence=bound.sentence),
        faster_plan=_gain(step, fastest) if _gain(step, fastest) > noise else 0.0,
        over_even=over_even,
        verdict=NEEDED if over_even is None else _verdict(over_even, error),
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        contributions=tuple(sorted(contributions, key=_least_worth_first)),
        doubts=tuple(_doubts(cluster, plan)),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """The fastest that was found on some cluster."""

    seconds: float
    gap: float
    """What of it another plan may be faster by."""
    stage: int


@dataclass(frozen=True)
class _Planner:
    """Plans the same global batch on one cluster after the other."""

    cluster: ClusterProfile
    global_batch: int
    stages: Sequence[int]
    max_micro_batch: int | None

    def step_on(self, cluster: ClusterProfile, policy: str = "exact") -> _Step | None:
        """The fastest step on a cluster; None: no plan fits."""
        plans, _ = plans_by_stage(
            cluster,
            global_batch=self.global_batch,
            stages=self.stages,
            policy=policy,
            max_micro_batch=self.max_micro_batch,
        )
        if not plans:
            return None
        prediction = plans[0].prediction or {}
        gap = prediction["optimality_gap"]
        return _Step(prediction["step_seconds"], gap or 0.0, plans[0].stage)

    def changes(self, found: Sequence[Kind], seconds: float) -> Iterator[Change]:
        """What each change gains over a step of `seconds`."""
        cluster = self.cluster
        for kind in found:
            yield from self._change(
                what_if.with_faster_devices(cluster, kind.ranks, _FASTER_DEVICE),
                seconds,
                "device",
                f"{100 * _FASTER_DEVICE - 100:.0f} % faster",
                kind,
            )
        network = cluster.network
        if cluster.world_size > 1 and network.reduce_scatter_seconds + network.all_gather_seconds:
            faster = what_if.with_faster_network(cluster, _FASTER_NETWORK)
            yield from self._change(faster, seconds, "network", "twice as fast")
            if cluster.overlap < 1.0:
                hidden = what_if.with_overlap(cluster, 1.0)
                amount = f"{cluster.overlap:.2f} to 1"
                yield from self._change(hidden, seconds, "overlap", amount)
        yield from self._changes_of_memory(found, seconds)

    def _changes_of_memory(self, found: Sequence[Kind], seconds: float) -> Iterator[Change]:
        """More memory counts where larger batches than were measured may fit, so they may here."""
        roomy, step = self.cluster, seconds
        if self._batches_may_grow:
            roomy = what_if.with_larger_batches(self.cluster, _LARGER_BATCHES)
            larger = self.step_on(roomy)
            if larger is not None and larger.seconds < seconds:
                step = larger.seconds
                yield Change(
                    what="batches",
                    ranks=(),
                    device="",
                    amount="twice the largest measured (profile with a larger max_batch)",
                    gain=_gain(seconds, step),
                    stage=larger.stage,
                )
        for kind in found:
            if self._memory_binds(roomy, kind):
                added = {
                    rank: round(_MORE_MEMORY * self.cluster.devices[rank].memory_bytes)
                    for rank in kind.ranks
                }
                each = " each" if len(kind.ranks) > 1 else ""
                yield from self._change(
                    what_if.with_memory(roomy, added),
                    step,
                    "memory",
                    f"+{format_bytes(added[kind.ranks[0]])}{each}",
                    kind,
                )

    def contributions(
        self, found: Sequence[Kind], seconds: float, error: float
    ) -> Iterator[Contribution]:
        """What each kind adds; where all ranks are of one, what one of them does."""
        if self.cluster.world_size == 1:
            return
        for kind in found:
            ranks = kind.ranks if len(found) > 1 else kind.ranks[-1:]
            step = self.step_on(what_if.without(self.cluster, ranks))
            without = None if step is None else _gain(seconds, step.seconds)
            yield Contribution(
                ranks=ranks,
                device=kind.device,
                without=without,
                verdict=NEEDED if without is None else _verdict(-without, error),
            )

    def _change(
        self,
        cluster: ClusterProfile,
        seconds: float,
        what: str,
        amount: str,
        kind: Kind | None = None,
    ) -> Iterator[Change]:
        step = self.step_on(cluster)
        if step is not None:
            yield Change(
                what=what,
                ranks=() if kind is None else kind.ranks,
                device="" if kind is None else kind.device,
                amount=amount,
                gain=_gain(seconds, step.seconds),
                stage=step.stage,
            )

    @cached_property
    def _most(self) -> int:
        """The largest micro-batch that anybody may ask for."""
        limit = self.max_micro_batch
        return self.global_batch if limit is None else min(limit, self.global_batch)

    @property
    def _batches_may_grow(self) -> bool:
        return any(device.max_batch < self._most for device in self.cluster.devices)

    def _memory_binds(self, cluster: ClusterProfile, kind: Kind) -> bool:
        """Whether there is anything that a device of this kind cannot hold at some stage."""
        rank = kind.ranks[0]
        largest = min(self._most, cluster.devices[rank].max_batch)
        memories = (StageCosts(cluster, stage).memories[rank] for stage in self.stages)
        return any(not memory.fits(largest, 1.0) for memory in memories)


def _step_on(cluster: ClusterProfile, plan: Plan, otherwise: float) -> float:
    try:
        return predict(cluster, plan).step_seconds
    except DoesNotFit:
        return otherwise


def _least_worth_first(contribution: Contribution) -> float:
    return math.inf if contribution.without is None else -contribution.without


def _gain(before: float, after: float) -> float:
    """By how much more samples per second there are with a step of `after` seconds."""
    return before / max(after, _SHORTEST_STEP) - 1.0


def _verdict(gain: float, error: float) -> str:
    return WORTH_IT if gain > error else NOT_WORTH_IT


def _doubts(cluster: ClusterProfile, plan: Plan) -> Iterator[str]:
    """Batches of this plan that lie in a hole of the profile, one sentence per kind of hole."""
    told = set()
    for rank, passes in enumerate(plan.micro_batches):
        device = cluster.devices[rank]
        batches = [0, *(point.batch for point in device.points)]
        for batch in sorted(set(passes)):
            below = max((b for b in batches if b < batch), default=0)
            above = min((b for b in batches if b >= batch), default=0)
            in_a_hole = batch not in batches and above > _HOLE * max(1, below)
            if in_a_hole and (device.name, below, above) not in told:
                told.add((device.name, below, above))
                yield (
                    f"rank {rank} ({device.name}) runs {batch} samples, but nothing was measured "
                    f"between {below} and {above}"
                )
