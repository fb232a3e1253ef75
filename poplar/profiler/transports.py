"""Times the transports that reduce in the same order, so that the choice never changes bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from poplar.comm import ALL_GATHERS, REDUCE_SCATTERS, Communicator, Group, connect
from poplar.profiler.collectives import Collectives

SECONDS = 3.0
"""Time budget, about."""
MOST_NUMEL = 1 << 22
"""Largest buffer that is timed, in elements."""


def sample_numels(numels: Sequence[int]) -> list[int]:
    """The smallest, a middle and the largest flat buffer of a model, without duplicates."""
    ranked = sorted(min(numel, MOST_NUMEL) for numel in numels)
    return sorted({ranked[0], ranked[len(ranked) // 2], ranked[-1]})


def time_transports(
    group: Group, usual: Communicator, sample: Callable[[Communicator], Collectives]
) -> tuple[tuple[str, float], ...]:
    """Names for `connect` and seconds, fastest first. Collective; the same on all ranks.

    Seconds are those of a reduce-scatter and an all-gather of every sample buffer, under even
    shares and with half of the model on one rank. The fastest reduce-scatter and the fastest
    all-gather of the process group, timed separately, make one transport. Transports for which
    there was no time left are omitted.

    Args:
        group: the ranks.
        usual: the transport for the placement of the ranks.
        sample: the collectives of a transport on the sample buffers.

    Returns:
        Empty if there is no choice: one rank, no transport of the same reduction order, or a
        process group that cannot carry the tensors of the device.
    """
    sums = [n for n, way in REDUCE_SCATTERS.items() if way.reduction_order == usual.reduction_order]
    device = sample(usual).device
    if not sums or group.size == 1 or not group.supports(device):
        return ()
    clock = _Clock(sample, SECONDS / (len(sums) + len(ALL_GATHERS) + 2))
    found = []
    if not usual.name.startswith("process_group"):
        found.append((usual.name, clock.reduce_scatter(usual) + clock.all_gather(usual)))

    def variants(names: Sequence[str], pattern: str) -> Iterator[tuple[str, Communicator]]:
        for name in names:
            yield name, connect(group, pattern.format(name), device)

    reducing = {
        name: clock.reduce_scatter(comm) for name, comm in variants(sums, "process_group:{}+direct")
    }
    gathering = {
        name: clock.all_gather(comm)
        for name, comm in variants([*ALL_GATHERS], "process_group:direct+{}")
    }
    reduce = min(reducing, key=reducing.__getitem__)
    gather = min(gathering, key=gathering.__getitem__)
    found.append((f"process_group:{reduce}+{gather}", reducing[reduce] + gathering[gather]))
    return tuple(sorted((way for way in found if way[1] < math.inf), key=lambda way: way[1]))


class _Clock:
    """Times transports until the budget is used up; later ones take infinitely long."""

    def __init__(self, sample: Callable[[Communicator], Collectives], seconds_each: float) -> None:
        self._sample, self._seconds_each = sample, seconds_each
        self._deadline = time.monotonic() + SECONDS

    def reduce_scatter(self, comm: Communicator) -> float:
        own = self._sample(comm)
        return self._time(own, own.reduce_scatter)

    def all_gather(self, comm: Communicator) -> float:
        own = self._sample(comm)
        return self._time(own, own.all_gather)

    def _time(self, own: Collectives, run: Callable[[Sequence[float]], None]) -> float:
        if self._is_over(own):
            return math.inf
        ranks = own.comm.group.size
        even = (1.0 / ranks,) * ranks
        skewed = (0.5, *(0.5 / (ranks - 1),) * (ranks - 1))
        return sum(own.seconds(run, shares, self._seconds_each / 2) for shares in (even, skewed))

    def _is_over(self, own: Collectives) -> bool:
        """Whether time is up on any rank, so that all ranks agree."""
        over = torch.tensor([float(time.monotonic() > self._deadline)], device="cpu")
        return any(map(bool, own.control.exchange(over, what="the time that is left")()))
