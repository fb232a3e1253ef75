"""How many units stay unsharded between the passes of a step, at stages that shard parameters.

A persistent unit is unsharded once a step instead of twice a pass, and takes the memory of its
parameters. Units become persistent in one order and branch and bound searches their number: no step
with a number in a range is faster than one with the communication of the largest number and the
memory of the smallest.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from poplar.plan import STRATEGIES, Plan, UnitPlan
from poplar.planner.branch_and_bound import TOLERANCE, Decision, fastest_plan, optimality_gap
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Request, largest_batches_of
from poplar.planner.memory_model import RankMemory
from poplar.planner.memory_shortfall import memory_shortfall
from poplar.profile import ModelProfile

_MOST_CUTS = 12
"""Ranges that are cut in two; each half needs one search."""


def fastest_plan_with_persistent_units(costs: StageCosts, request: Request) -> Decision:
    """The fastest plan of one stage, with as many persistent units as make it faster.

    There must be no `memory_shortfall`.
    """
    if costs.stage < 3 or not costs.cluster.model.unit_names:
        return fastest_plan(costs, request)
    return _Search(costs, request).run()


def persistence_order(model: ModelProfile) -> list[int]:
    """Units in the order in which they become persistent: the most useful per byte first.

    Resident units need no more memory. The first unit's unshard overlaps with nothing. Others are
    unsharded twice a pass, so small ones come first; the last one is unsharded once a pass.
    """
    resident = sorted(set(model.resident_units))
    sharded = [unit for unit in range(len(model.unit_numels)) if unit not in resident]
    inner = sorted(sharded[1:-1], key=lambda unit: model.unit_numels[unit])
    return [*resident, *sharded[:1], *inner, *sharded[1:][-1:]]


def unit_plans(costs: StageCosts) -> tuple[UnitPlan, ...]:
    """`Plan.units` with the persistent units of these costs."""
    names = costs.cluster.model.unit_names
    return tuple(
        UnitPlan(names[unit], STRATEGIES[costs.stage], keep_gathered=True)
        for unit in sorted(costs.persistent)
    )


@dataclass(frozen=True)
class _Optimistic(StageCosts):
    """Costs with persistent units of which only some take memory: a lower bound."""

    in_memory: frozenset[int] = frozenset()

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        return StageCosts(self.cluster, self.stage, self.in_memory).memories


class _Range(NamedTuple):
    """Numbers of persistent units, and a lower bound on every step with one of them."""

    bound: float
    least: int
    most: int


class _Search:
    """Best-first search over ranges of numbers."""

    def __init__(self, costs: StageCosts, request: Request) -> None:
        self._cluster, self._stage, self._request = costs.cluster, costs.stage, request
        self._order = persistence_order(costs.cluster.model)
        self._best: Plan | None = None
        self._seconds = math.inf
        self._ranges: list[_Range] = []
        self._closed = math.inf
        """The smallest bound of ranges that are not searched further."""

    def run(self) -> Decision:
        """The fastest plan found; of equally fast ones, that with fewer persistent units."""
        self._add(0, len(self._order))
        if self._ranges:  # not all units fit
            self._keep(0, fastest_plan(self._costs(0), self._request).plan)
        for _ in range(_MOST_CUTS):
            if not self._ranges or self._ranges[0].bound >= self._seconds * (1.0 - TOLERANCE):
                break
            _, least, most = heapq.heappop(self._ranges)
            middle = (least + most) // 2
            self._add(least, middle)
            self._add(middle + 1, most)
        assert self._best is not None, "a stage without a memory shortfall has a plan"
        bound = min([self._seconds, self._closed, *(one.bound for one in self._ranges[:1])])
        return Decision(self._best, optimality_gap(bound, self._seconds))

    def _add(self, least: int, most: int) -> None:
        """Search a range optimistically, and keep the plan with as many units as fit."""
        in_memory = frozenset(self._order[:least])
        persistent = frozenset(self._order[:most])
        costs = _Optimistic(self._cluster, self._stage, persistent, in_memory)
        if memory_shortfall(costs) is not None:
            return
        plan, gap = fastest_plan(costs, self._request)
        numbers = range(least + 1, most + 1)
        fitting = least + bisect_right(numbers, False, key=lambda n: not self._fits(n, plan))
        self._keep(fitting, plan)
        self._keep(least, plan)
        bound = costs.step_seconds(plan.micro_batches, plan.shares) * (1.0 - (gap or 0.0))
        if fitting < most and bound < self._seconds * (1.0 - TOLERANCE):
            heapq.heappush(self._ranges, _Range(bound, least, most))
        else:
            self._closed = min(self._closed, bound)

    def _keep(self, number: int, plan: Plan) -> None:
        """Take a plan with this many persistent units, which fits, if it is the fastest."""
        costs = self._costs(number)
        seconds = costs.step_seconds(plan.micro_batches, plan.shares)
        fewer = self._best is not None and number < len(self._best.units)
        if seconds < self._seconds or (fewer and seconds == self._seconds):
            self._seconds = seconds
            self._best = dataclasses.replace(plan, units=unit_plans(costs))

    def _costs(self, number: int) -> StageCosts:
        return StageCosts(self._cluster, self._stage, frozenset(self._order[:number]))

    def _fits(self, number: int, plan: Plan) -> bool:
        groups = self._cluster.device_group_indices
        memories = dict(zip(groups, self._costs(number).memories, strict=True))
        keys = set(zip(groups, largest_batches_of(plan.micro_batches), plan.shares, strict=True))
        return all(memories[group].fits(largest, share) for group, largest, share in keys)
