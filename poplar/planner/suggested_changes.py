"""The smallest changes (`what_if`) with which a plan fits, for a search that found none.

A plan fits if the ranks hold the state and at least one sample; its speed is not considered.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from poplar.planner import what_if
from poplar.planner.baselines import policy_shortfall
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_shortfall import Allowed, Request, Shortfall
from poplar.planner.saved_memory import (
    may_host,
    shortfall_with_recomputation,
    with_all_on_host,
)
from poplar.planner.what_if import Changed, DeviceGroup, device_groups, with_equal_devices
from poplar.values.profile import ClusterProfile

_MAX_MEBIBYTES = 2**24
_MAX_DEVICES = 256


def request_shortfall(costs: StageCosts, request: Request) -> Shortfall | None:
    """What is missing for every plan at this stage; None: one fits.

    Args:
        costs: without recomputation and without state in host memory.
    """
    if may_host(costs, request):
        plain = request._replace(may_host=False)
        if request_shortfall(costs, plain) is None:
            return None
        return request_shortfall(replace(costs, cluster=with_all_on_host(costs.cluster)), plain)
    if request.may_recompute:
        return shortfall_with_recomputation(costs, request)
    return policy_shortfall(costs, request)


def suggested_changes(
    cluster: ClusterProfile,
    request: Request,
    stages: Sequence[int],
    shortfalls: Sequence[Shortfall],
    allowed: Allowed,
) -> tuple[str, ...]:
    """The smallest changes that make a plan fit, each on its own."""
    groups = device_groups(cluster)
    measured, cluster = cluster, with_equal_devices(cluster, groups)
    all_ranks = DeviceGroup("", tuple(range(cluster.world_size)))

    def fitting_stage(
        changed: ClusterProfile, stages: Iterable[int], wanted: Request = request
    ) -> int | None:
        """The highest of the stages at which a plan fits."""
        for stage in sorted(stages, reverse=True):
            costs = least = StageCosts(changed, stage)
            if may_host(costs, wanted):
                least = StageCosts(with_all_on_host(changed), stage)
            if any(memory.is_too_small for memory in least.memories):
                continue
            if request_shortfall(costs, wanted) is None:
                return stage
        return None

    def suggestion(changed: Changed) -> str:
        """The change and the stage at which a plan fits after it; empty if none fits."""
        stage = fitting_stage(changed.cluster, stages)
        change = f"{changed.change.subject} {changed.change.amount}"
        return "" if stage is None else f"{change} at stage {stage}"

    highest = max(stages)
    others = [stage for stage in allowed.stages if stage not in measured.failed_stages]
    higher = [stage for stage in others if stage > highest]
    lower = [stage for stage in others if stage < highest]
    fitting = (
        f"stage {stage}"
        for stage in (*higher, *reversed(lower))
        if fitting_stage(cluster, [stage]) is not None
    )
    found = list(islice(fitting, 1))
    of_exact = stages if request.policy == "exact" or allowed.policies else ()
    stage = fitting_stage(cluster, of_exact, request._replace(policy="exact"))
    if stage is not None:
        found.append(f"policy exact at stage {stage}")
    stage = fitting_stage(cluster, of_exact, request._replace(policy="exact", may_host=True))
    if (
        stage is not None
        and not request.may_host
        and found[-1:] != [f"policy exact at stage {stage}"]
    ):
        policy = "" if request.policy == "exact" else "policy exact with "
        found.append(f"{policy}state in host memory (host_state='auto') at stage {stage}")
    lacking = {tuple(one.bytes_by_rank) for one in shortfalls}
    if request.policy == "exact" and not request.may_recompute:
        recomputing = (
            what_if.recomputing(cluster, ranks)
            for ranks in [*sorted(lacking, key=len), all_ranks.ranks]
        )
        found += islice(filter(None, map(suggestion, recomputing)), 1)
    # Each device on its own: equal devices of a group have the least memory of any of them.
    too_small = {*lacking, *((rank,) for ranks in lacking for rank in ranks)}
    too_small |= {group.ranks for group in groups}
    fewer = sorted(too_small - {all_ranks.ranks, ()}, key=lambda ranks: (len(ranks), ranks))
    smaller = (what_if.without(measured, ranks) for ranks in fewer)
    found += islice(filter(None, map(suggestion, smaller)), 1)
    memory_groups = [*groups, all_ranks] if len(groups) > 1 else groups
    more_memory = [
        (len(group.ranks), partial(what_if.more_memory, cluster, group)) for group in memory_groups
    ]
    found += _smallest(more_memory, _MAX_MEBIBYTES, suggestion)
    more_devices = [(1, partial(what_if.more_devices, cluster, group)) for group in groups]
    found += _smallest(more_devices, _MAX_DEVICES, suggestion)
    found += _smallest([(1, partial(what_if.smaller_activations, cluster))], 100, suggestion)
    return tuple(found)


def _smallest(
    changes: Iterable[tuple[int, Callable[[int], Changed]]],
    largest: int,
    suggestion: Callable[[Changed], str],
) -> list[str]:
    """Of changes at the smallest sizes that help, the one that is smallest over its ranks.

    Each change comes with the number of its ranks. Sizes that are not smaller than those of the
    best change so far are not tried.
    """
    found: list[str] = []
    least = math.inf
    for ranks, change in changes:
        most = largest if not found else min(largest, int(least - 1) // ranks)
        if most < 1 or not suggestion(change(most)):
            continue
        sizes = range(1, most)
        size = 1 + bisect_left(sizes, True, key=lambda n: bool(suggestion(change(n))))
        least, found = size * ranks, [suggestion(change(size))]
    return found
