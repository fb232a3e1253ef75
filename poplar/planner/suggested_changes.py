"""Where no plan fits: the smallest changes, each on its own, with which one would.

A remedy is tried on a changed cluster, by the same conditions that said that nothing fits. What is
said is enough to hold one sample; it promises no speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from poplar.formatting import format_bytes, format_ranks
from poplar.plan import STRATEGIES
from poplar.planner.baselines import Shortage
from poplar.planner.cost_model import StageCosts
from poplar.planner.device_groups import alike_kinds
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.memory_shortfall import shortage as exact_shortage
from poplar.planner.what_if import with_copies, with_memory, without
from poplar.profile import ClusterProfile, DeviceProfile

_MIB = 2**20
_MOST_COPIES = 1024
"""Devices of one kind; who needs more has another problem."""
_KINDS_TRIED = 3
_NAMED = 4
"""Ranks that each get a number of their own."""
_ROUNDS = 16
"""Each of them gives ranks what they lack; three are usual."""


def with_remedies(
    cluster: ClusterProfile, missing: Mapping[int, NoPlanFits], shortage: Shortage
) -> NoPlanFits:
    """The error of the stage that comes closest, and what would help.

    Args:
        cluster: on which nothing fits.
        missing: what is missing, by each stage that was asked for.
        shortage: what misses how much, on any cluster.
    """
    stages = tuple(sorted(missing))
    closest = min(stages, key=lambda stage: (missing[stage].missing_bytes, stage))
    remedies = (
        *_other_stage(cluster, stages, shortage),
        *_own_shares(cluster, stages),
        *_without_the_smallest(cluster, missing, shortage),
        *_least_memory(cluster, stages, shortage),
        *_more_devices(cluster, stages, shortage),
        *_smaller_activations(cluster, max(stages), shortage),
    )
    return missing[closest].helped_by(remedies)


def _other_stage(
    cluster: ClusterProfile, stages: Sequence[int], shortage: Shortage
) -> Iterator[str]:
    """The next stage that shards more, or else one that has fewer buffers."""
    highest = max(stages)
    for stage in (*range(highest + 1, len(STRATEGIES)), *range(highest - 1, -1, -1)):
        if stage not in stages and shortage(StageCosts(cluster, stage)) is None:
            yield f"stage {stage}"
            return


def _own_shares(cluster: ClusterProfile, stages: Sequence[int]) -> Iterator[str]:
    """What only the search does: uneven shares, ranks without samples."""
    if any(exact_shortage(StageCosts(cluster, stage)) is None for stage in stages):
        yield "policy 'exact', which gives each rank as much of the state as it can hold"


def _without_the_smallest(
    cluster: ClusterProfile, missing: Mapping[int, NoPlanFits], shortage: Shortage
) -> Iterator[str]:
    """Ranks that hold too little even for what nobody can take from them."""
    options = []
    for stage, error in missing.items():
        lacking = () if error.lack is None else tuple(error.lack.bytes_by_rank)
        if 0 < len(lacking) < cluster.world_size:
            left = StageCosts(without(cluster, lacking), stage)
            if shortage(left) is None:
                options.append((len(lacking), stage, lacking))
    if options:
        _, stage, ranks = min(options)
        yield f"the others without {format_ranks(ranks)} at stage {stage}"


def _least_memory(
    cluster: ClusterProfile, stages: Sequence[int], shortage: Shortage
) -> Iterator[str]:
    """The least memory that makes the state and one sample fit, at the stage that needs least."""
    if cluster.memory_reserve >= 1.0:
        return
    options = [(_more_memory(cluster, stage, shortage), stage) for stage in stages]
    needed = [(sum(added.values()), stage, added) for added, stage in options if added]
    if needed:
        _, stage, added = min(needed, key=lambda option: option[:2])
        yield f"{_said(added, cluster.world_size)} at stage {stage}"


def _more_memory(cluster: ClusterProfile, stage: int, shortage: Shortage) -> dict[int, int]:
    """Bytes that ranks need more, by rank; empty: none found."""
    usable = 1.0 - cluster.memory_reserve
    added: dict[int, int] = {}
    lacking: Mapping[int, float] = {}
    # What each rank lacks whatever the plan, then what is left: at most one rank's.
    for _ in range(_ROUNDS):
        error = shortage(StageCosts(with_memory(cluster, added), stage))
        if error is None or error.lack is None:
            break
        lacking = error.lack.bytes_by_rank
        for rank, missing in lacking.items():
            more = max(1, math.ceil(missing / usable / _MIB)) * _MIB
            added[rank] = added.get(rank, 0) + more
    else:
        return {}
    everyone = range(cluster.world_size)
    if len(added) > _NAMED:  # nobody buys memory for one rank of many: alike for all of them
        least = _least(
            lambda count: _fits_with(
                cluster, dict.fromkeys(everyone, count * _MIB), stage, shortage
            ),
            max(added.values()) // _MIB,
        )
        return dict.fromkeys(everyone, least * _MIB)
    if len(lacking) == 1:  # where shares are free, less may do than it was said to lack
        (last,) = lacking
        least = _least(
            lambda count: _fits_with(cluster, {**added, last: count * _MIB}, stage, shortage),
            added[last] // _MIB,
        )
        added[last] = least * _MIB
    return added


def _no_less(size: int) -> str:
    """As a person reads it, and as much at least: whoever adds what was said has enough."""
    hundredth = 2**30 / 100
    return format_bytes(math.ceil(size / hundredth) * hundredth if size >= 2**28 else size)


def _fits_with(
    cluster: ClusterProfile, added: Mapping[int, int], stage: int, shortage: Shortage
) -> bool:
    return shortage(StageCosts(with_memory(cluster, added), stage)) is None


def _said(added: Mapping[int, int], world_size: int) -> str:
    """`1.00 GiB more on rank 0 and 20.0 MiB more on each of ranks 1-3`."""
    if len(added) == world_size > 1 and len(set(added.values())) == 1:
        return f"{_no_less(added[0])} more on each of all {world_size} ranks"
    by_size: dict[int, list[int]] = {}
    for rank, size in sorted(added.items()):
        by_size.setdefault(size, []).append(rank)
    parts = [
        f"{_no_less(size)} more on {'each of ' if len(ranks) > 1 else ''}{format_ranks(ranks)}"
        for size, ranks in by_size.items()
    ]
    return " and ".join(parts)


def _more_devices(
    cluster: ClusterProfile, stages: Sequence[int], shortage: Shortage
) -> Iterator[str]:
    """As many more devices of a kind as it takes, of the kind of which it takes the fewest."""
    stage = max(stages)
    best: tuple[int, str] | None = None
    for kind in alike_kinds(cluster)[:_KINDS_TRIED]:

        def fits(copies: int, rank: int = kind.ranks[0]) -> bool:
            larger = with_copies(cluster, rank, copies)
            return shortage(StageCosts(larger, stage)) is None

        most = 1
        while most < _MOST_COPIES and not fits(most):
            most *= 2
        if fits(most):
            found = (_least(fits, most), kind.device)
            best = found if best is None or found[0] < best[0] else best
    if best is not None:
        yield f"{best[0]} more {best[1]} at stage {stage}"


def _smaller_activations(cluster: ClusterProfile, stage: int, shortage: Shortage) -> Iterator[str]:
    """How little checkpointing may leave of what a sample takes, if that alone is enough."""
    percent = 100

    def fits(less: int) -> bool:
        part = (percent - less) / percent
        smaller = tuple(_with_activations(device, part) for device in cluster.devices)
        return shortage(StageCosts(replace(cluster, devices=smaller), stage)) is None

    if fits(percent):
        left = percent - _least(fits, percent)
        yield (
            "activation checkpointing or shorter sequences that leave at most "
            f"{left} % of a sample's activations"
        )


def _with_activations(device: DeviceProfile, part: float) -> DeviceProfile:
    points = tuple(
        replace(point, activation_bytes=int(part * point.activation_bytes))
        for point in device.points
    )
    return replace(device, points=points)


def _least(fits: Callable[[int], bool], enough: int) -> int:
    """The least count from 1 on that fits; `enough` does."""
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
