"""Times the transports that reduce in the same order, so that the choice never changes bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from poplar.comm import ALL_GATHERS, REDUCE_SCATTERS
from poplar.profiler.collectives import Collectives

SECONDS = 3.0
"""Time budget, about."""
MOST_NUMEL = 1 << 22
"""Largest buffer that is timed, in elements."""


def sample_numels(numels: Sequence[int]) -> list[int]:
    """The smallest, a middle and the largest flat buffer of a model, without duplicates."""
    ranked = sorted(min(numel, MOST_NUMEL) for numel in numels)
    return sorted({ranked[0], ranked[len(ranked) // 2], ranked[-1]})


def time_transports(sample: Collectives) -> tuple[tuple[str, float], ...]:
    """Names for `connect` and seconds, fastest first. Collective; the same on all ranks.

    Seconds are those of a reduce-scatter and an all-gather of every sample buffer, under even
    shares and with half of the model on one rank. The fastest reduce-scatter and the fastest
    all-gather of the process group, timed separately, make one transport. Transports for which
    there was no time left are omitted.

    Args:
        sample: collectives on a few buffers, over the transport for the placement of the ranks.

    Returns:
        Empty if there is no choice: one rank, no transport of the same reduction order, or a
        process group that cannot carry the tensors of the device.
    """
    usual, group = sample.comm, sample.control.group
    sums = [n for n, way in REDUCE_SCATTERS.items() if way.reduction_order == usual.reduction_order]
    if not sums or group.size == 1 or not group.supports(sample.device):
        return ()
    even = (1.0 / group.size,) * group.size
    skewed = (0.5, *(0.5 / (group.size - 1),) * (group.size - 1))
    each = SECONDS / (len(sums) + len(ALL_GATHERS) + 2) / 2
    deadline = time.monotonic() + SECONDS

    def seconds(name: str, collective: Callable[[Collectives, Sequence[float]], None]) -> float:
        """Infinite if time is up on any rank."""
        own = sample.over(name)
        if any(own.exchange(float(time.monotonic() > deadline))):
            return math.inf
        return sum(own.seconds(collective, shares, each) for shares in (even, skewed))

    reduce_scatter, all_gather = Collectives.reduce_scatter, Collectives.all_gather
    found = []
    if not usual.name.startswith("process_group"):
        found.append(
            (usual.name, seconds(usual.name, reduce_scatter) + seconds(usual.name, all_gather))
        )
    reducing = [(seconds(f"process_group:{n}+direct", reduce_scatter), n) for n in sums]
    gathering = [(seconds(f"process_group:direct+{n}", all_gather), n) for n in ALL_GATHERS]
    (reduce_seconds, reduce), (gather_seconds, gather) = min(reducing), min(gathering)
    found.append((f"process_group:{reduce}+{gather}", reduce_seconds + gather_seconds))
    return tuple(sorted((way for way in found if way[1] < math.inf), key=lambda way: way[1]))
