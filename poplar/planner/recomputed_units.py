"""How many units each rank recomputes in the backward, for the memory of larger batches.

Recomputation takes time and saves the memory of activations. A rank recomputes its first units: in
the backward they are the last, when the activations of all others are freed. Branch and bound
searches how many, equal for equal devices: no step with numbers in a range is faster than one with
the seconds of the smallest numbers and the memory of the largest.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from poplar.planner.branch_and_bound import Decision
from poplar.planner.cost_model import StageCosts, costs_of
from poplar.planner.memory_model import Caps, rank_memory
from poplar.planner.memory_shortfall import Shortfall, memory_shortfall
from poplar.planner.persistent_units import fastest_plan_with_persistent_units, unit_plans
from poplar.planner.recomputed_curves import (
    recomputed_part,
    recomputing,
    saved_part,
    with_recomputed_parts,
)
from poplar.planner.request import Request
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

_MOST_CUTS = 3
"""Ranges that are cut in two; each half needs up to two searches."""
_SETTLED = 1e-3
"""A plan that is proven to be this close to the fastest is good enough."""
_Counts = tuple[int, ...]
"""By rank, how many units it recomputes."""


def shortfall_with_recomputation(costs: StageCosts, request: Request) -> Shortfall | None:
    """What is missing at this stage if no rank recomputes units, or if all ranks recompute all
    units, whichever is less; None: a plan fits.

    Recomputation may need more memory than none, because its memory is not known by unit.

    Args:
        costs: without recomputation.
        request: what a plan is for.
    """
    plain = memory_shortfall(costs, request)
    cluster = costs.cluster
    if plain is None or not cluster.model.recomputable_units:
        return plain
    all_units = with_recomputed_parts(cluster, [(0.0, 1.0)] * cluster.world_size)
    recomputed = memory_shortfall(StageCosts(all_units, costs.stage), request)
    return recomputed and min(recomputed, plain, key=lambda one: one.total_bytes)


def fastest_plan_with_recomputation(
    costs: StageCosts, request: Request, plain: Decision | None, preference: float
) -> Decision:
    """The fastest plan of one stage, with recomputed units where they make it faster.

    There must be one: no `shortfall_with_recomputation`.

    Args:
        costs: without recomputation.
        request: what the plan is for.
        plain: the fastest plan without recomputation; None if none fits.
        preference: `plain` is chosen if its step is slower by at most this fraction.
    """
    if plain is not None and not _memory_may_bind(costs, request):
        return plain
    return _Search(costs, request, plain, preference).run()


def with_fewest_recomputed_units(
    cluster: ClusterProfile, costs: StageCosts, plan: Plan
) -> StageCosts:
    """The costs with the fewest of their recomputed units beside which a plan fits.

    Args:
        cluster: the profile, without recomputation.
        costs: of the plan's stage, persistent units and recomputed units.
        plan: its batches and shares fit with these.
    """
    orders = [sorted(units) for units in costs.recomputed]
    ranges = [range(len(order) + 1) for order in orders]
    fewest = _Ladder(cluster, costs, orders).fewest(plan, ranges)
    assert fewest is not None, "the plan fits with all of its recomputed units"
    units = tuple(frozenset(order[:n]) for order, n in zip(orders, fewest, strict=True))
    return costs.with_recomputed(cluster, units)


def _memory_may_bind(costs: StageCosts, request: Request) -> bool:
    """Whether a rank cannot hold everything: all state and units beside its largest batch."""
    cluster = costs.cluster
    recomputable = cluster.model.recomputable_units
    if not recomputable or not any(device.recomputed_points for device in cluster.devices):
        return False
    persistent = range(len(cluster.model.unit_numels))

    def lacks(rank: int) -> bool:
        device = cluster.devices[rank]
        points = (*device.points[-1:], *device.recomputed_points[-1:])
        largest = min(request.max_micro_batch, max(point.batch for point in points))
        return not rank_memory(cluster, costs.stage, rank, persistent).fits(
            Caps(largest, largest), 1.0
        )

    return any(costs.by_rank(lacks))


def _step_seconds(cluster: ClusterProfile, plan: Plan) -> float:
    return costs_of(cluster, plan).step_seconds(plan.micro_batches, plan.shares)


class _Range(NamedTuple):
    """Bounds on the number of recomputed units of every rank."""

    least: _Counts
    most: _Counts


class _Search:
    """Best-first search over ranges of numbers."""

    def __init__(
        self, costs: StageCosts, request: Request, plain: Decision | None, preference: float
    ) -> None:
        self._costs, self._request = costs, request
        self._order = costs.cluster.model.recomputable_units
        orders = [self._order] * costs.cluster.world_size
        self._ladder = _Ladder(costs.cluster, costs, orders)
        self._plain = plain
        seconds = math.inf if plain is None else _step_seconds(costs.cluster, plain.plan)
        self._best: tuple[float, int] = (seconds / (1.0 + preference), 0)
        """Seconds and recomputed units of `_plan`, over all ranks; a plan with recomputed units
        must be faster than the plain one by the preference."""
        self._plan: Plan | None = None
        self._tried: set[_Counts] = set()
        self._ranges: list[tuple[float, int, _Range, _Range]] = []
        """A heap by bound, with the two halves of each range."""
        self._number = count()
        self._closed = math.inf
        """The smallest bound of ranges that are not searched further."""

    def run(self) -> Decision:
        """The fastest plan found; of equally fast ones, that with fewer recomputed units."""
        devices = self._costs.cluster.devices
        most = tuple(len(self._order) if device.recomputed_points else 0 for device in devices)
        self._add(_Range((0,) * len(devices), most))
        for _ in range(_MOST_CUTS):
            if not self._ranges or self._ranges[0][0] >= self._limit():
                break
            _, _, few, many = heapq.heappop(self._ranges)
            self._add(few)
            self._add(many)
        bound = min([self._closed, *(bound for bound, *_ in self._ranges[:1])])
        if self._plan is not None:
            return Decision(self._plan, min(self._best[0], bound))
        assert self._plain is not None, "a stage without a memory shortfall has a plan"
        return self._plain._replace(bound=min(bound, self._plain.bound or 0.0))

    def _limit(self) -> float:
        """Ranges whose bound is not below these seconds cannot improve the plan."""
        return self._best[0] * (1.0 - _SETTLED)

    def _add(self, numbers: _Range) -> None:
        """Search a range optimistically; keep its plan with as few recomputed units as fit."""
        optimistic = self._with_parts(*numbers)
        if memory_shortfall(optimistic, self._request) is not None:
            return
        plan, bound = fastest_plan_with_persistent_units(optimistic, self._request)
        assert bound is not None
        if bound >= self._limit():
            self._closed = min(self._closed, bound)
            return
        fewest = self._keep(plan, numbers)
        alike = self._equal_devices_alike(fewest)
        if bound < self._limit():
            self._search_with(alike)
        rank = self._costliest(plan, numbers.least, alike)
        if rank is None or bound >= self._limit():
            self._closed = min(self._closed, bound)
            return
        few, many = list(numbers.most), list(numbers.least)
        groups = self._costs.cluster.device_group_indices
        for other, group in enumerate(groups):
            if group == groups[rank]:
                few[other], many[other] = alike[rank] - 1, alike[rank]
        halves = numbers._replace(most=tuple(few)), numbers._replace(least=tuple(many))
        heapq.heappush(self._ranges, (bound, next(self._number), *halves))

    def _with_parts(self, least: _Counts, most: _Counts) -> StageCosts:
        """The seconds of the least and the bytes of the most recomputed units."""
        model, order = self._costs.cluster.model, self._order
        parts = [
            (recomputed_part(model, order[:few]), saved_part(model, order[:many]))
            for few, many in zip(least, most, strict=True)
        ]
        return StageCosts(with_recomputed_parts(self._costs.cluster, parts), self._costs.stage)

    def _search_with(self, counts: _Counts) -> None:
        """Search with exactly these numbers, and keep the plan with as few of them as fit."""
        if counts in self._tried or not any(counts):
            return
        costs = self._with_parts(counts, counts)
        if memory_shortfall(costs, self._request) is not None:
            return
        self._tried.add(counts)
        plan = fastest_plan_with_persistent_units(costs, self._request).plan
        self._keep(plan, _Range((0,) * len(counts), counts))

    def _keep(self, plan: Plan, numbers: _Range) -> _Counts:
        """Take a plan with the fewest recomputed units in a range beside which it fits."""
        ranges = [range(low, high + 1) for low, high in zip(*numbers, strict=True)]
        fewest = self._ladder.fewest(plan, ranges)
        assert fewest is not None, "an optimistic plan fits with some number in its range"
        costs = self._costs_with(fewest, plan)
        seconds = costs.step_seconds(plan.micro_batches, plan.shares)
        if (seconds, sum(fewest)) < self._best:
            self._best = seconds, sum(fewest)
            self._plan = dataclasses.replace(plan, units=unit_plans(costs))
        return fewest

    def _costs_with(self, counts: _Counts, plan: Plan) -> StageCosts:
        units = tuple(frozenset(self._order[:number]) for number in counts)
        persistent = _persistent(self._costs.cluster, plan)
        costs = dataclasses.replace(self._costs, persistent=persistent)
        return costs.with_recomputed(self._costs.cluster, units)

    def _equal_devices_alike(self, counts: _Counts) -> _Counts:
        """The largest number of each group of equal devices."""
        groups = self._costs.cluster.device_group_indices
        largest: dict[int, int] = {}
        for group, number in zip(groups, counts, strict=True):
            largest[group] = max(largest.get(group, 0), number)
        return tuple(largest[group] for group in groups)

    def _costliest(self, plan: Plan, least: _Counts, counts: _Counts) -> int | None:
        """The rank whose recomputation beyond `least` takes the most time; None: no rank's."""
        before, after = (self._with_parts(each, each).cluster for each in (least, counts))

        def extra(rank: int) -> float:
            both = before.devices[rank].seconds, after.devices[rank].seconds
            first, second = (sum(map(curve, plan.micro_batches[rank])) for curve in both)
            return second - first

        beyond = [rank for rank, low in enumerate(least) if counts[rank] > low]
        return max(beyond, key=extra, default=None)


class _Ladder:
    """By rank and number of recomputed units, the memory that a plan needs."""

    def __init__(
        self, cluster: ClusterProfile, costs: StageCosts, orders: Sequence[Sequence[int]]
    ) -> None:
        """`orders`: by rank, units in the order in which they are recomputed."""
        self._cluster, self._stage, self._orders = cluster, costs.stage, orders

    def fewest(self, plan: Plan, ranges: Sequence[range]) -> _Counts | None:
        """By rank, the smallest number in its range beside which a plan fits; None: there is no
        such number.
        """
        persistent = _persistent(self._cluster, plan)
        memories = StageCosts(self._cluster, self._stage, persistent).memories
        caps = list(map(Caps.of, plan.micro_batches))

        def fits(rank: int, number: int) -> bool:
            units, model = self._orders[rank][:number], self._cluster.model
            parts = recomputed_part(model, units), saved_part(model, units) if units else 0.0
            device = recomputing(self._cluster.devices[rank], *parts)
            memory = dataclasses.replace(memories[rank], device=device)
            return memory.fits(caps[rank], plan.shares[rank])

        counts = []
        for rank, numbers in enumerate(ranges):
            if numbers.start == 0 and fits(rank, 0):
                counts.append(0)
                continue
            positive = range(max(1, numbers.start), numbers.stop)
            at = bisect_left(positive, True, key=partial(fits, rank))
            if at == len(positive):
                return None
            counts.append(positive[at])
        return tuple(counts)


def _persistent(cluster: ClusterProfile, plan: Plan) -> frozenset[int]:
    names = cluster.model.unit_names
    return frozenset(names.index(unit.name) for unit in plan.units if unit.persistent)
