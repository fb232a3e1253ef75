"""Suggestions where no plan fits: the smallest changes that make one fit, each on its own.

A change is checked with the rule that found the shortfall, on a changed cluster (`what_if`). A plan
that fits holds at least one sample; its speed is not considered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from poplar.formatting import format_bytes, format_ranks
from poplar.plan import STRATEGIES
from poplar.planner import what_if
from poplar.planner.cost_model import StageCosts
from poplar.planner.device_groups import device_groups
from poplar.planner.memory_shortfall import Shortfall, ShortfallRule, memory_shortfall
from poplar.profile import ClusterProfile

_MIB = 2**20
_MAX_COPIES = 1024
_MAX_GROUPS_TRIED = 3
_MAX_RANKS_NAMED = 4
"""If more ranks lack memory, the suggestion is the same amount for every rank."""
_MAX_ROUNDS = 16
"""Each round adds what ranks lack; three are usual."""


def suggested_changes(
    cluster: ClusterProfile, shortfalls: Sequence[Shortfall], rule: ShortfallRule
) -> tuple[str, ...]:
    """Find the smallest changes that make a plan fit, each on its own.

    Args:
        cluster: on which no plan fits.
        shortfalls: what is missing at each stage that was requested.
        rule: what is missing at a stage of any cluster.
    """
    finder = _Finder(cluster, tuple(sorted(one.stage for one in shortfalls)), rule)
    return (
        *finder.another_stage(),
        *finder.uneven_shares(),
        *finder.without_the_smallest(shortfalls),
        *finder.more_memory(),
        *finder.more_devices(),
        *finder.smaller_activations(),
    )


@dataclass(frozen=True)
class _Finder:
    cluster: ClusterProfile
    stages: tuple[int, ...]
    """Requested, ascending."""
    rule: ShortfallRule

    def another_stage(self) -> Iterator[str]:
        """The next higher stage that fits, which shards more; else a lower one."""
        highest = self.stages[-1]
        for stage in (*range(highest + 1, len(STRATEGIES)), *range(highest - 1, -1, -1)):
            if stage not in self.stages and self._fits(self.cluster, stage):
                yield f"stage {stage}"
                return

    def uneven_shares(self) -> Iterator[str]:
        """Policy 'exact' also considers uneven shares and ranks without samples."""
        if any(memory_shortfall(StageCosts(self.cluster, stage)) is None for stage in self.stages):
            yield "policy 'exact', which gives each rank as much of the state as it can hold"

    def without_the_smallest(self, shortfalls: Sequence[Shortfall]) -> Iterator[str]:
        """The cluster without the ranks that lack memory."""
        options = []
        for shortfall in shortfalls:
            ranks = tuple(shortfall.bytes_by_rank)
            if len(ranks) < self.cluster.world_size:
                left = what_if.without(self.cluster, ranks)
                if self._fits(left, shortfall.stage):
                    options.append((len(ranks), shortfall.stage, ranks))
        if options:
            _, stage, ranks = min(options)
            yield f"the others without {format_ranks(ranks)} at stage {stage}"

    def more_memory(self) -> Iterator[str]:
        """The least memory to add, at the stage that needs the least."""
        if self.cluster.memory_reserve >= 1.0:
            return
        options = [(self._memory_to_add(stage), stage) for stage in self.stages]
        possible = [(sum(added.values()), stage, added) for added, stage in options if added]
        if possible:
            _, stage, added = min(possible, key=lambda option: option[:2])
            yield f"{_format_added(added, self.cluster.world_size)} at stage {stage}"

    def _memory_to_add(self, stage: int) -> dict[int, int]:
        """By rank, the bytes to add; empty: none found."""
        usable = 1.0 - self.cluster.memory_reserve
        added: dict[int, int] = {}
        lacking: tuple[int, ...] = ()
        for _ in range(_MAX_ROUNDS):
            shortfall = self.rule(StageCosts(what_if.with_memory(self.cluster, added), stage))
            if shortfall is None:
                break
            lacking = tuple(shortfall.bytes_by_rank)
            for rank, missing in shortfall.bytes_by_rank.items():
                more = max(1, math.ceil(missing / usable / _MIB)) * _MIB
                added[rank] = added.get(rank, 0) + more
        else:
            return {}
        if len(added) > _MAX_RANKS_NAMED:
            lacking = tuple(range(self.cluster.world_size))
        elif len(lacking) != 1:
            return added

        # The sum of the rounds is enough, but with free shares less may be.
        def with_each(count: int) -> dict[int, int]:
            return {**added, **dict.fromkeys(lacking, count * _MIB)}

        enough = max(added.get(rank, 0) for rank in lacking) // _MIB
        return with_each(
            _least(
                lambda count: self._fits(
                    what_if.with_memory(self.cluster, with_each(count)), stage
                ),
                enough,
            )
        )

    def more_devices(self) -> Iterator[str]:
        """The fewest more devices of one group, at the highest stage."""
        stage = self.stages[-1]
        options = []
        for group in device_groups(self.cluster)[:_MAX_GROUPS_TRIED]:

            def fits(copies: int, rank: int = group.ranks[0]) -> bool:
                return self._fits(what_if.with_copies(self.cluster, rank, copies), stage)

            enough = 1
            while enough < _MAX_COPIES and not fits(enough):
                enough *= 2
            if fits(enough):
                options.append((_least(fits, enough), group.device))
        if options:
            copies, device = min(options, key=lambda option: option[0])
            yield f"{copies} more {device} at stage {stage}"

    def smaller_activations(self) -> Iterator[str]:
        """The largest part of the activations with which a plan fits at the highest stage."""

        def fits(percent_less: int) -> bool:
            smaller = what_if.with_activations(self.cluster, 1.0 - percent_less / 100)
            return self._fits(smaller, self.stages[-1])

        if fits(100):
            yield (
                "activation checkpointing or shorter sequences that leave at most "
                f"{100 - _least(fits, 100)} % of a sample's activations"
            )

    def _fits(self, cluster: ClusterProfile, stage: int) -> bool:
        return self.rule(StageCosts(cluster, stage)) is None


def _format_added(added: Mapping[int, int], world_size: int) -> str:
    """`1.00 GiB more on rank 0 and 20.0 MiB more on each of ranks 1-3`."""
    if len(added) == world_size > 1 and len(set(added.values())) == 1:
        return f"{format_bytes(added[0], round_up=True)} more on each of all {world_size} ranks"
    by_size: dict[int, list[int]] = {}
    for rank, size in sorted(added.items()):
        by_size.setdefault(size, []).append(rank)
    return " and ".join(
        f"{format_bytes(size, round_up=True)} more on {'each of ' if len(ranks) > 1 else ''}"
        f"{format_ranks(ranks)}"
        for size, ranks in by_size.items()
    )


def _least(fits: Callable[[int], bool], enough: int) -> int:
    """The least count from 1 that fits, where `enough` is known to fit."""
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
