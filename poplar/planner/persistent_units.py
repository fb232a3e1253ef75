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
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache, cached_property

from poplar.planner.branch_and_bound import TOLERANCE, Decision, fastest_plan
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import RankMemory
from poplar.planner.memory_shortfall import Request, memory_shortfall, shortfall_of
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import ModelProfile

_MOST_CUTS = 12
"""Ranges that are cut in two; each half needs one search."""
_EFFORT = 0.1
"""Of the search of a range with several numbers: its bound is loose however long it is."""
_EFFORT_OF_OTHERS = 0.5
"""Of the search of a number of persistent units, if there is a plan without any."""


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
    inner = sorted(sharded[1:-1], key=model.parameter_bytes.__getitem__)
    return [*resident, *sharded[:1], *inner, *sharded[1:][-1:]]


def unit_plans(costs: StageCosts) -> tuple[UnitPlan, ...]:
    """`Plan.units` with the persistent and the recomputed units of these costs."""
    names = costs.cluster.model.unit_names
    return tuple(
        UnitPlan(
            names[unit],
            persistent=unit in costs.persistent,
            recomputed_on=tuple(r for r, units in enumerate(costs.recomputed) if unit in units),
        )
        for unit in sorted(costs.persistent.union(*costs.recomputed))
    )


@dataclass(frozen=True)
class _Optimistic(StageCosts):
    """Costs with persistent units of which only some take memory: a lower bound."""

    in_memory: frozenset[int] = frozenset()

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        return StageCosts(self.cluster, self.stage, self.in_memory).memories


class _Search:
    """Best-first search over ranges of numbers."""

    def __init__(self, costs: StageCosts, request: Request) -> None:
        self._costs, self._request = costs, request
        self._order = persistence_order(costs.cluster.model)
        self._best: tuple[float, int] = (math.inf, 0)
        """Seconds and number of persistent units of `_plan`."""
        self._plan: Plan | None = None
        self._ranges: list[tuple[float, int, int]] = []
        """A heap of least and largest numbers by a lower bound on every step with one of them."""
        self._closed = math.inf
        """The smallest bound of ranges that are not searched further."""
        self._exact = cache(self._exact_plan)

    def run(self) -> Decision:
        """The fastest plan found; of equally fast ones, that with fewer persistent units."""
        self._add(0, len(self._order))
        if self._ranges:  # not all units fit
            self._keep(0, self._exact(0).plan)
        for _ in range(_MOST_CUTS):
            if not self._ranges or self._ranges[0][0] >= self._limit():
                break
            _, least, most = heapq.heappop(self._ranges)
            middle = (least + most) // 2
            self._add(least, middle)
            self._add(middle + 1, most)
        assert self._plan is not None, "a stage without a memory shortfall has a plan"
        seconds, number = self._best
        units = unit_plans(self._with_first(number))
        bound = min([seconds, self._closed, *(bound for bound, _, _ in self._ranges[:1])])
        return Decision(dataclasses.replace(self._plan, units=units), bound)

    def _limit(self) -> float:
        """Ranges whose bound is not below these seconds cannot improve the plan."""
        return self._faster().below * (1.0 - TOLERANCE)

    def _add(self, least: int, most: int) -> None:
        """Search a range optimistically, and keep the plan with as many units as fit."""
        optimistic = _Optimistic(
            self._costs.cluster,
            self._costs.stage,
            frozenset(self._order[:most]),
            in_memory=frozenset(self._order[:least]),
        )
        if memory_shortfall(optimistic, self._request) is not None:
            return
        if least == most:
            plan, bound = self._exact(least)
        else:
            plan, bound = fastest_plan(optimistic, self._faster(), effort=_EFFORT)
        assert bound is not None

        def lacks_memory(number: int) -> bool:
            costs = self._with_first(number)
            return shortfall_of(costs, plan.micro_batches, plan.shares) is not None

        fitting = least + bisect_left(range(least + 1, most + 1), True, key=lacks_memory)
        self._keep(fitting, plan)
        self._keep(least, plan)
        if fitting < most and bound < self._limit():
            heapq.heappush(self._ranges, (bound, least, most))
        else:
            self._closed = min(self._closed, bound)

    def _keep(self, number: int, plan: Plan) -> None:
        """Take a plan with this many persistent units, which fits, if it is the fastest."""
        seconds = self._with_first(number).step_seconds(plan.micro_batches, plan.shares)
        if (seconds, number) < self._best:
            self._best, self._plan = (seconds, number), plan

    def _exact_plan(self, number: int) -> Decision:
        """The fastest plan with this many persistent units."""
        effort = _EFFORT_OF_OTHERS if number else 1.0
        return fastest_plan(self._with_first(number), self._faster(), effort=effort)

    def _faster(self) -> Request:
        """A request for plans that are faster than the best one."""
        return self._request._replace(below=min(self._request.below, self._best[0]))

    def _with_first(self, number: int) -> StageCosts:
        return dataclasses.replace(self._costs, persistent=frozenset(self._order[:number]))
