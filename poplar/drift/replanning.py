"""A new plan for ranks whose speed has changed, if it pays. Values in, values out."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from types import MappingProxyType

from poplar.drift.speed_levels import Row, SpeedLevels
from poplar.planner.active_ranks import without_ranks
from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
from poplar.planner.prediction import predict
from poplar.planner.search import Choice, search
from poplar.planner.what_if import with_slower_devices
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

LEAST_CHANGE = math.log(1.05)
"""Change of a rank's level, relative to other ranks, after which a plan is searched for."""
CERTAINTY = 5.2
"""Standard errors of a level that count as no change. Among all periods of 40,000 steps of four
ranks without a change, no mean is expected to be farther away."""
LEAST_GAIN = 0.03
"""Part by which throughput must rise, so that plans do not alternate."""
LEAST_USE = 1.06
"""Seconds of a step without ranks that have no samples, over those with them, up to which they are
left out: they can be measured then, and a device that is slow is slow in collectives, too. No more
than a predicted step is usually wrong by, as what is measured with all ranks is not known of some.
"""
REGROUP_SECONDS = 5.0
"""What a change of the ranks that are left out must save beside the moved state: new process groups
and a new engine."""
WARM_UP = 5
"""First steps, which count for nothing: ranks compile and allocate in them."""
_ERROR_OF_MEDIAN = 1.2533
_IDLE_ERROR = 0.02
"""Standard error of what a rank that is left out measures: see `idle_speed`."""


@dataclass(frozen=True, kw_only=True)
class Replan:
    """A plan that is faster at the speeds that the ranks have now."""

    plan: Plan
    gain: float
    """Predicted throughput over that of the plan before, minus 1."""
    slowdowns: dict[int, float]
    """By rank whose speed has changed since the last plan: how many times slower it is, relative
    to most ranks."""
    compared_with: Plan
    """The plan of before."""


class Replanner:
    """Follows the speeds of the ranks, and searches plans at the same stage and global batch."""

    def __init__(
        self,
        profile: ClusterProfile,
        *,
        left_out: Collection[int] = (),
        levels: Sequence[float] | None = None,
        since: Mapping[int, float] = MappingProxyType({}),
        leave_out: Choice = "never",
    ) -> None:
        """
        Args:
            profile: of all ranks.
            left_out: ranks that the current plan leaves out. As long as it does, use this object.
            levels: by rank, as `levels` of an earlier object; default: those of the profile.
            since: by rank that was left out before, its level then.
            leave_out: "auto": plans may leave out other ranks.
        """
        self._profile, self._leave_out = profile, leave_out
        everyone = range(profile.world_size)
        self._active = [rank for rank in everyone if rank not in left_out]
        self.levels: Sequence[float] = levels or (0.0,) * profile.world_size
        """By rank, the logarithm of its slowdown by which the latest plan was found."""
        self._searched: Sequence[float] = self.levels
        """The last levels at which a plan was searched for."""
        self._levels_before: Sequence[float] = self.levels
        """`levels` before the latest plan was found."""
        self.since = {rank: since.get(rank, self.levels[rank]) for rank in left_out}
        """By rank that is left out, its level when it was."""
        self._speeds = SpeedLevels([self.levels[rank] for rank in self._active])
        self._left_of_warm_up = WARM_UP

    def add(
        self,
        steps: Sequence[Sequence[Row]],
        plan: Plan,
        *,
        steps_left: float,
        largest_batches: Mapping[int, int] = MappingProxyType({}),
        idle: Mapping[int, float] = MappingProxyType({}),
    ) -> Replan | None:
        """Add steps of all active ranks, and look for a change once.

        Args:
            steps: by step and active rank.
            steps_left: steps in which a new plan pays for itself.
            largest_batches: by rank, the largest micro-batch that fits, where it is known.
            idle: by rank that is left out, the change of its level since then, where it is known.
                Without it, the rank stays left out.

        Returns:
            A faster plan, if there is one and a speed has changed.
        """
        for rows in steps:
            if not self._left_of_warm_up:
                self._speeds.add(rows)
            elif any(row.has_work for row in rows):
                self._left_of_warm_up -= 1
                self._speeds.add_lengths(rows)
        self._speeds.look_for_changes()
        now, errors = self._levels_now(idle)
        shared, certain = self._changes(now, errors)
        if max(certain) - min(certain) <= LEAST_CHANGE:
            return None
        levels = [
            level if change else before + shared
            for level, before, change in zip(now, self.levels, certain, strict=True)
        ]
        if max(map(abs, map(operator.sub, levels, self._searched))) < LEAST_CHANGE / 2:
            return None
        profile = self._profile.with_largest_batches(largest_batches)
        cluster = with_slower_devices(profile, list(map(math.exp, levels)))
        known = idle if self._leave_out == "auto" else ()
        staying = [rank for rank in plan.left_out if rank not in known]
        found = _faster_plan(cluster, plan, steps_left, staying, self._leave_out)
        self._searched = levels
        if found is None:
            return None
        changes = list(map(operator.sub, levels, self.levels))
        middle = median(changes)  # if half of the ranks have changed, it lies between two levels
        usual = min(changes, key=lambda change: (round(abs(change - middle), 2), abs(change)))
        slowdowns = {
            rank: math.exp(change - usual)
            for rank, change in enumerate(changes)
            if abs(change - usual) > max(LEAST_CHANGE, CERTAINTY * errors[rank])
        }
        self._levels_before, self.levels = self.levels, levels
        return Replan(plan=found[0], gain=found[1], slowdowns=slowdowns, compared_with=plan)

    def reject(self) -> None:
        """Take back the plan that `add` has found last. It may be found again."""
        self.levels = self._searched = self._levels_before

    def _levels_now(self, idle: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """By rank, its level and the standard error of it; infinite if it is not known."""
        now, errors = list(self.levels), [math.inf] * len(self.levels)
        for rank, level, error in zip(
            self._active, self._speeds.levels, self._speeds.errors, strict=True
        ):
            now[rank], errors[rank] = level, error
        for rank, change in idle.items():
            now[rank], errors[rank] = self.since[rank] + change, _IDLE_ERROR
        return now, errors

    def _changes(self, now: Sequence[float], errors: Sequence[float]) -> tuple[float, list[float]]:
        """Changes of levels since the last plan.

        Returns:
            What all active ranks share, on which no plan depends; by rank, the least change beside
            it.
        """
        changes = list(map(operator.sub, now, self.levels))
        active = self._active
        shared, shared_error = _weighted_median(
            [changes[rank] for rank in active], [errors[rank] ** -2.0 for rank in active]
        )
        beside = [change - shared for change in changes]
        certain = (
            change if abs(change) > CERTAINTY * math.hypot(error, shared_error) else 0.0
            for change, error in zip(beside, errors, strict=True)
        )
        return shared, list(certain)


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The median of values whose variances are 1 / weight, and its standard error."""
    if not any(weights):
        return 0.0, math.inf
    ordered = sorted(zip(values, weights, strict=True))
    sums = list(accumulate(weight for _, weight in ordered))
    at = next(at for at, total in enumerate(sums) if total >= sums[-1] / 2.0)
    return ordered[at][0], _ERROR_OF_MEDIAN / math.sqrt(sums[-1])


def _faster_plan(
    cluster: ClusterProfile,
    plan: Plan,
    steps_left: float,
    staying: Sequence[int],
    leave_out: Choice,
) -> tuple[Plan, float] | None:
    """The best plan at this stage and its gain in throughput, if it pays.

    Args:
        staying: ranks that stay left out.
        leave_out: "auto": it may leave out others.
    """

    def fastest(without: Sequence[int]) -> tuple[Plan, float]:
        found = search(
            without_ranks(cluster, without),
            global_batch=plan.global_batch,
            stages=(plan.stage,),
            recompute="auto" if any(unit.recomputed_on for unit in plan.units) else "never",
            factored="never",
            host_state="auto" if plan.host_state else "never",
            leave_out=leave_out,
            communication=plan.communication,
        )
        # `apply_plan` does not change these.
        found = replace(found, transport=plan.transport, factored=plan.factored)
        others = [rank for rank in range(cluster.world_size) if rank not in without]
        left_out = sorted([*without, *(others[rank] for rank in found.left_out)])
        found = found.of_active_ranks().beside(left_out)
        return found, predict(cluster, found).step_seconds

    try:
        now = predict(cluster, plan).step_seconds
    except ValueError:  # the profile does not have what the plan of now runs
        return None
    try:
        found, then = fastest(staying)
        useless = [rank for rank in found.active_ranks if not found.samples(rank)]
        if useless and leave_out == "auto":
            with suppress(DoesNotFit, NoPlanFits):
                other, seconds = fastest([*staying, *useless])
                if seconds <= LEAST_USE * then:
                    found, then = other, seconds
    except (DoesNotFit, NoPlanFits):
        return None
    gain = now / then - 1.0
    saved = steps_left * (now - then) - _moving_seconds(cluster, plan, found)
    return (found, gain) if gain >= LEAST_GAIN and saved > 0.0 else None


def _moving_seconds(cluster: ClusterProfile, old: Plan, new: Plan) -> float:
    """About how long it takes to send the state that changes its owner, at most."""
    moved = float(len(set(old.left_out) - set(new.left_out)))  # at stage 0, all of it to each
    if old.stage:
        both = zip(old.shares, new.shares, strict=True)
        moved = sum(max(0.0, after - before) for before, after in both)
    model = cluster.model
    each = (model.param_bytes + model.optimizer_bytes) / max(model.param_bytes, 1.0)
    regrouping = REGROUP_SECONDS if old.left_out != new.left_out else 0.0
    return moved * each * cluster.network.all_gather_seconds + regrouping
