"""The smallest changes (`what_if`) with which a plan fits, for a search that found none.

A plan fits if its ranks hold at least one sample; its speed is not considered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from poplar.plan import STRATEGIES
from poplar.planner import what_if
from poplar.planner.device_groups import DeviceGroup, device_groups
from poplar.planner.memory_shortfall import Shortfall
from poplar.planner.what_if import Change, Changed, Scenario

_MIB = 2**20
_MAX_MEMORY = 2**24
"""MiB that are added to a rank."""
_MAX_COPIES = 1024


def suggested_changes(shortfalls: Sequence[Shortfall], **request: Any) -> tuple[str, ...]:
    """The smallest changes that make a plan fit, each on its own.

    Args:
        shortfalls: what is missing at each requested stage.
        request: the arguments of the search that found no plan.
    """
    finder = _Finder(Scenario(**request))
    changes = (
        *finder.other_requests(),
        *finder.fewer_ranks(shortfalls),
        *finder.more_memory(),
        *finder.more_devices(),
        *finder.smaller_activations(),
    )
    return tuple(map(_sentence, changes))


def _sentence(change: Change) -> str:
    stage = "" if change.stage is None else f" at stage {change.stage}"
    return f"{change.whose} {change.amount}{stage}"


@dataclass(frozen=True)
class _Finder:
    scenario: Scenario

    def other_requests(self) -> Iterator[Change]:
        """The next higher stage that fits, else the next lower one; and policy "exact"."""
        highest = max(self.scenario.stages)
        for stage in (*range(highest + 1, len(STRATEGIES)), *range(highest - 1, -1, -1)):
            if replace(self.scenario, stages=(stage,)).fitting_stage() is not None:
                yield Change(what="stage", amount=str(stage))
                break
        exact = replace(self.scenario, policy="exact").fitting_stage()
        if exact is not None:
            yield Change(what="policy", amount="exact", stage=exact)

    def fewer_ranks(self, shortfalls: Sequence[Shortfall]) -> Iterator[Change]:
        """The cluster without the ranks that lack memory at some stage: the fewest ranks."""
        cluster = self.scenario.cluster
        for ranks in sorted({tuple(one.bytes_by_rank) for one in shortfalls}, key=len):
            if len(ranks) < cluster.world_size:
                changed = what_if.without(cluster, ranks)
                stage = self._stage(changed)
                if stage is not None:
                    yield replace(changed.change, stage=stage)
                    return

    def more_memory(self) -> Iterator[Change]:
        """More memory on one group of devices, or on all ranks: the least in total."""
        cluster = self.scenario.cluster
        groups = {*device_groups(cluster), DeviceGroup("", tuple(range(cluster.world_size)))}

        def added(group: DeviceGroup, mebibytes: int) -> Changed:
            return what_if.more_memory(cluster, group, mebibytes * _MIB)

        yield from self._smallest([partial(added, group) for group in groups], _MAX_MEMORY)

    def more_devices(self) -> Iterator[Change]:
        """More devices of one group: the fewest."""
        cluster = self.scenario.cluster
        added = [partial(what_if.more_devices, cluster, group) for group in device_groups(cluster)]
        yield from self._smallest(added, _MAX_COPIES)

    def smaller_activations(self) -> Iterator[Change]:
        """Activations that are smaller by the fewest percent."""
        yield from self._smallest(
            [partial(what_if.smaller_activations, self.scenario.cluster)], 100
        )

    def _smallest(
        self, questions: Sequence[Callable[[int], Changed]], largest: int
    ) -> Iterator[Change]:
        """Of changes by size, at their smallest sizes that fit, the one that is smallest in total.

        Args:
            questions: the changed cluster by the size of the change, for each rank that changes.
            largest: size to try.
        """
        options = []
        for changed in questions:
            size = self._least(changed, largest)
            if size is not None:
                option = changed(size)
                change = replace(option.change, stage=self._stage(option))
                options.append((size * max(1, len(change.ranks)), change))
        if options:
            yield min(options, key=lambda option: option[0])[1]

    def _least(self, changed: Callable[[int], Changed], largest: int) -> int | None:
        """The least size from 1 to `largest` that fits; None: not even the largest does."""

        def fits(size: int) -> bool:
            return self._stage(changed(size)) is not None

        size = 1
        while not fits(size):
            if size == largest:
                return None
            size = min(2 * size, largest)
        return 1 + bisect_left(range(1, size), True, key=fits)

    def _stage(self, changed: Changed) -> int | None:
        return replace(self.scenario, cluster=changed.cluster).fitting_stage()
