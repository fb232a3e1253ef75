"""A new plan for ranks whose speed has changed, if it pays. Values in, values out."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from poplar.drift.speed_levels import Row, SpeedLevels
from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
from poplar.planner.prediction import predict
from poplar.planner.search import search
from poplar.planner.what_if import with_slower_devices
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

LEAST_CHANGE = math.log(1.05)
"""Change of a rank's level, relative to other ranks, after which a plan is searched for."""
CERTAINTY = 3.0
"""Standard errors of a level that count as no change."""
LEAST_GAIN = 0.03
"""Part by which throughput must rise, so that plans do not alternate."""
WARM_UP = 5
"""First steps, which count for nothing: ranks compile and allocate in them."""


@dataclass(frozen=True, kw_only=True)
class Replan:
    """A plan that is faster at the speeds that the ranks have now."""

    plan: Plan
    gain: float
    """Predicted throughput over that of the plan before, minus 1."""
    slowdowns: dict[int, float]
    """By rank whose speed has changed since the last plan: how many times slower it is, relative
    to the rank that has changed least."""


class Replanner:
    """Follows the speeds of the ranks, and searches plans at the same stage and global batch."""

    def __init__(self, profile: ClusterProfile) -> None:
        self._profile = profile
        self._speeds = SpeedLevels(profile.world_size)
        self._left_of_warm_up = WARM_UP
        self._planned: Sequence[float] = self._speeds.levels
        """The levels of the current plan, or of the last one that was found."""
        self._searched: Sequence[float] = self._planned
        """The last levels at which a plan was searched for."""

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """By rank, how many times slower it is than its profile."""
        return tuple(map(math.exp, self._speeds.levels))

    def add(
        self,
        rows: Sequence[Row],
        plan: Plan,
        *,
        steps_left: float,
        largest_batches: Mapping[int, int] = MappingProxyType({}),
    ) -> Replan | None:
        """Add one step of all ranks.

        Args:
            rows: by rank.
            plan: the current plan.
            steps_left: steps in which a new plan pays for itself.
            largest_batches: by rank, the largest micro-batch that fits, where it is known.

        Returns:
            A faster plan, if there is one and a speed has changed.
        """
        if self._left_of_warm_up:
            self._left_of_warm_up -= 1
            self._speeds.add_lengths(rows)
            return None
        self._speeds.add(rows)
        shared, certain = self._changes()
        if max(certain) - min(certain) <= LEAST_CHANGE:
            return None
        levels = [
            now if change else before + shared
            for now, before, change in zip(self._speeds.levels, self._planned, certain, strict=True)
        ]
        if max(map(_distance, levels, self._searched)) < LEAST_CHANGE / 2:
            return None
        profile = self._profile.with_largest_batches(largest_batches)
        cluster = with_slower_devices(profile, list(map(math.exp, levels)))
        found = self._faster_plan(plan, cluster, levels, steps_left)
        self._searched = levels
        if found is not None:
            self._planned = levels
        return found

    def _changes(self) -> tuple[float, list[float]]:
        """Changes of levels since the last plan.

        Returns:
            What all ranks share, on which no plan depends; by rank, the least change beside it.
        """
        errors = self._speeds.errors
        changes = list(map(operator.sub, self._speeds.levels, self._planned))
        known = [change for change, error in zip(changes, errors, strict=True) if error < math.inf]
        # No mean of two: if half of the ranks are slower, it is the change of none of them.
        shared = sorted(known, key=abs)[(len(known) - 1) // 2] if known else 0.0
        beside = [change - shared for change in changes]
        certain = (
            math.copysign(max(0.0, abs(change) - CERTAINTY * error), change)
            for change, error in zip(beside, errors, strict=True)
        )
        return shared, list(certain)

    def _faster_plan(
        self, plan: Plan, cluster: ClusterProfile, levels: Sequence[float], steps_left: float
    ) -> Replan | None:
        """The best plan on a cluster with these levels, if it pays."""
        try:
            found = search(
                cluster,
                global_batch=plan.global_batch,
                stages=(plan.stage,),
                recompute="auto" if any(unit.recomputed_on for unit in plan.units) else "never",
                factored="never",
                host_state="auto" if plan.host_state else "never",
            )
            # A change of these needs a new engine.
            found = replace(found, transport=plan.transport, factored=plan.factored)
            now, then = (predict(cluster, each).step_seconds for each in (plan, found))
        except (DoesNotFit, NoPlanFits):
            return None
        saved = steps_left * (now - then) - _moving_seconds(cluster, plan, found)
        gain = now / then - 1.0
        if gain < LEAST_GAIN or saved <= 0.0:
            return None
        changes = [now - before for now, before in zip(levels, self._planned, strict=True)]
        shared = min(changes, key=abs)
        return Replan(
            plan=found,
            gain=gain,
            slowdowns={
                rank: math.exp(change - shared)
                for rank, change in enumerate(changes)
                if abs(change - shared) > LEAST_CHANGE
            },
        )


def _distance(one: float, other: float) -> float:
    return abs(one - other)


def _moving_seconds(cluster: ClusterProfile, old: Plan, new: Plan) -> float:
    """About how long it takes to send the state that changes its owner, at most."""
    if not old.stage:
        return 0.0  # every rank has all of it
    moved = sum(
        max(0.0, after - before) for before, after in zip(old.shares, new.shares, strict=True)
    )
    model = cluster.model
    each = (model.param_bytes + model.optimizer_bytes) / max(model.param_bytes, 1.0)
    return moved * each * cluster.network.all_gather_seconds
