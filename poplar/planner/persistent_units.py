"""How many units stay gathered between the passes of a step, where units are gathered at all.

A unit that stays is gathered once a step instead of twice a pass, and takes the memory of its
parameters. Units are kept in one order, and only their number is searched, by branch and bound:
between two numbers no step is faster than one with the communication of the larger and the memory
of the smaller, batches and shares as `exact` finds them. The order is what is worth most for a byte
where units are alike, which is no proof where they are not.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from poplar.plan import STRATEGIES, Plan, UnitPlan
from poplar.planner.branch_and_bound import Decision, Request, exact
from poplar.planner.cost_model import StageCosts
from poplar.planner.joint_allocation import TOLERANCE
from poplar.planner.memory_model import RankMemory
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.profile import ModelProfile

_MOST_CUTS = 12
"""Ranges of numbers that are cut in two; each half is a search."""


def exact_with_persistent_units(costs: StageCosts, request: Request) -> Decision:
    """The fastest plan of one stage, with as many units kept gathered as make it faster.

    Raises:
        NoPlanFits: says what is missing.
    """
    if costs.stage < 3 or not costs.cluster.model.unit_names:
        return exact(costs, request)
    return _Search(costs, request).run()


@dataclass(frozen=True)
class _Lighter(StageCosts):
    """Units that stay, of which only some take memory: a bound."""

    weighing: frozenset[int] = frozenset()

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        return StageCosts(self.cluster, self.stage, self.weighing).memories


class _Range(NamedTuple):
    """Numbers of kept units, and a bound that no step with one of them is below."""

    bound: float
    least: int
    most: int


class _Search:
    """Best-first over ranges of numbers."""

    def __init__(self, costs: StageCosts, request: Request) -> None:
        self._cluster, self._stage, self._request = costs.cluster, costs.stage, request
        self._order = list(_by_worth(costs.cluster.model))
        self._found: dict[int, tuple[float, Plan]] = {}
        """By number: the fastest step that is known, and its plan."""
        self._ranges: list[_Range] = []
        self._closed = math.inf
        """No step in a range that is done with is faster."""

    def run(self) -> Decision:
        """Of the plans that were come across, one with fewer units where that costs no more than is
        preferred. What is best without any is searched only where some may have to go.
        """
        every = len(self._order)
        self._add(0, every)
        if every not in self._found:  # some may have to go, or all: what is fastest without?
            self.keep(0, exact(self._costs(0), self._request).plan)
        for _ in range(_MOST_CUTS):
            if not self._ranges or self._ranges[0].bound >= self._best * (1.0 - TOLERANCE):
                break
            _, least, most = heapq.heappop(self._ranges)
            middle = (least + most) // 2
            self._add(least, middle)
            self._add(middle + 1, most)
        limit = self._best * (1.0 + self._request.preference)
        fewest = min(count for count, (seconds, _) in self._found.items() if seconds <= limit)
        seconds, plan = self._found[fewest]
        bound = min([self._best, self._closed, *(one.bound for one in self._ranges[:1])])
        gap = 1.0 - bound / seconds if seconds else 0.0
        return Decision(plan, gap if gap > TOLERANCE else 0.0)

    def keep(self, count: int, plan: Plan) -> None:
        """A plan with so many units kept, which fits."""
        costs = self._costs(count)
        seconds = costs.step_seconds(plan.micro_batches, plan.shares)
        if count not in self._found or seconds < self._found[count][0]:
            names = self._cluster.model.unit_names
            units = tuple(
                UnitPlan(names[unit], STRATEGIES[self._stage], keep_gathered=True)
                for unit in sorted(costs.persistent)
            )
            self._found[count] = seconds, dataclasses.replace(plan, units=units)

    @property
    def _best(self) -> float:
        return min(seconds for seconds, _ in self._found.values())

    def _costs(self, count: int) -> StageCosts:
        return StageCosts(self._cluster, self._stage, frozenset(self._order[:count]))

    def _add(self, least: int, most: int) -> None:
        persistent, weighing = frozenset(self._order[:most]), frozenset(self._order[:least])
        costs = _Lighter(self._cluster, self._stage, persistent, weighing)
        try:
            plan, gap = exact(costs, self._request)
        except NoPlanFits:
            return
        fitting = bisect_right(
            range(least + 1, most + 1), False, key=lambda count: not self._fits(count, plan)
        )
        self.keep(least + fitting, plan)
        self.keep(least, plan)
        bound = costs.step_seconds(plan.micro_batches, plan.shares) * (1.0 - gap)
        if least + fitting < most and bound < self._best * (1.0 - TOLERANCE):
            heapq.heappush(self._ranges, _Range(bound, least, most))
        else:
            self._closed = min(self._closed, bound)

    def _fits(self, count: int, plan: Plan) -> bool:
        kinds = self._cluster.device_kinds
        memories = dict(zip(kinds, self._costs(count).memories, strict=True))
        return all(
            memories[kind].fits(max(passes, default=0), share)
            for kind, passes, share in set(zip(kinds, plan.micro_batches, plan.shares, strict=True))
        )


def _by_worth(model: ModelProfile) -> Iterator[int]:
    """Residents, which take no more memory; the first unit, whose gather runs under nothing; those
    that are gathered twice a pass, small ones first; the last, which is gathered once.
    """
    resident = frozenset(model.resident_units)
    returning = [unit for unit in range(len(model.unit_numels)) if unit not in resident]
    first, twice = returning[:1], returning[1:-1]
    yield from sorted(resident)
    yield from first
    yield from sorted(twice, key=lambda unit: model.unit_numels[unit])
    yield from returning[1:][-1:]
