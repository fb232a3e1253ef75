"""The smallest changes (`what_if`) with which a plan fits, for a search that found none.

A plan fits if the ranks hold the state and at least one sample; its speed is not considered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from poplar.plan import STRATEGIES
from poplar.planner import what_if
from poplar.planner.baselines import shortfall_rule
from poplar.planner.cost_model import StageCosts
from poplar.planner.device_groups import DeviceGroup, device_groups, with_equal_devices
from poplar.planner.memory_shortfall import Shortfall
from poplar.planner.what_if import Change, Changed, Scenario

_MAX_MEBIBYTES = 2**24
_MAX_DEVICES = 256


def suggested_changes(shortfalls: Sequence[Shortfall], **request: Any) -> tuple[str, ...]:
    """The smallest changes that make a plan fit, each on its own.

    Args:
        shortfalls: what is missing at each requested stage.
        request: the arguments of the search that found no plan.
    """
    scenario = Scenario(**request)
    groups = device_groups(scenario.cluster)
    scenario = replace(scenario, cluster=with_equal_devices(scenario.cluster, groups))
    all_ranks = DeviceGroup("", tuple(range(scenario.cluster.world_size)))
    memory_groups = [*groups, all_ranks] if len(groups) > 1 else groups
    highest = max(scenario.stages)
    stages = (*range(highest + 1, len(STRATEGIES)), *range(highest - 1, -1, -1))
    too_small = sorted(
        {tuple(one.bytes_by_rank) for one in shortfalls} - {all_ranks.ranks}, key=len
    )
    changes = (
        *_first(what_if.other_stage(scenario, stage) for stage in stages),
        *_first([what_if.other_policy(scenario, "exact")]),
        *_first(what_if.without(scenario, ranks) for ranks in sorted(too_small, key=len)),
        *_smallest(
            [partial(what_if.more_memory, scenario, group) for group in memory_groups],
            _MAX_MEBIBYTES,
        ),
        *_smallest(
            [partial(what_if.more_devices, scenario, group) for group in groups], _MAX_DEVICES
        ),
        *_smallest([partial(what_if.smaller_activations, scenario)], 100),
    )
    return tuple(map(_sentence, changes))


def _sentence(change: Change) -> str:
    stage = "" if change.what == "stage" else f" at stage {change.stage}"
    return f"{change.subject} {change.amount}{stage}"


def _first(options: Iterable[Changed]) -> list[Change]:
    """The first change that fits."""
    for option in options:
        stage = _fitting_stage(option)
        if stage is not None:
            return [replace(option.change, stage=stage)]
    return []


def _smallest(questions: Iterable[Callable[[int], Changed]], largest: int) -> list[Change]:
    """Of changes at the smallest sizes that fit, the one that is smallest over its ranks.

    Args:
        questions: the changed scenario by the size of the change.
        largest: size to try.
    """
    found: list[tuple[int, Change]] = []
    for changed in questions:
        size = _least(changed, largest)
        for change in _first([changed(size)]):
            found.append((size * max(1, len(change.ranks)), change))
    return [min(found, key=lambda one: one[0])[1]] if found else []


def _least(changed: Callable[[int], Changed], largest: int) -> int:
    """The least size from 1 that fits, or `largest`."""

    def fits(size: int) -> bool:
        return _fitting_stage(changed(size)) is not None

    enough = 1
    while enough < largest and not fits(enough):
        enough = min(2 * enough, largest)
    return 1 + bisect_left(range(1, enough), True, key=fits)


def _fitting_stage(changed: Changed) -> int | None:
    """The highest requested stage at which a plan fits."""
    scenario = changed.scenario
    rule = shortfall_rule(scenario.policy, scenario.global_batch)
    stages = sorted(scenario.stages, reverse=True)
    return next((s for s in stages if rule(StageCosts(scenario.cluster, s)) is None), None)
