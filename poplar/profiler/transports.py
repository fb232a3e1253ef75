"""Which transport is fastest here, among those that add in the same order: of equal bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from poplar.comm import ALL_GATHERS, REDUCE_SCATTERS, Communicator, Group, connect
from poplar.profiler.collectives import Collectives

SECONDS = 3.0
"""At most, about."""
MOST_NUMEL = 1 << 22
"""Elements of a buffer that is tried."""


def sample_numels(numels: Sequence[int]) -> list[int]:
    """Of a model's flat buffers the smallest, a middle one and the largest, if they differ."""
    ranked = sorted(min(numel, MOST_NUMEL) for numel in numels)
    return sorted({ranked[0], ranked[len(ranked) // 2], ranked[-1]})


def time_transports(
    group: Group, usual: Communicator, sample: Callable[[Communicator], Collectives]
) -> tuple[tuple[str, float], ...]:
    """Names that `connect` knows and seconds, the fastest first. Collective; the same on all ranks.

    Seconds are of a reduction and a gather of every sample buffer, under even shares and where one
    rank has half. Of a process group the fastest way to add and the fastest way to gather, which
    are tried apart, make one transport. What there was no time for is left out.

    Args:
        group: who takes part.
        usual: the transport that the ranks' places call for. Where no other adds in its order there
            is nothing to choose, and the result is empty.
        sample: a transport's collectives on the sample buffers.
    """
    sums = [n for n, way in REDUCE_SCATTERS.items() if way.reduction_order == usual.reduction_order]
    if not sums or group.size == 1:
        return ()
    clock = _Clock(sample, SECONDS / (len(sums) + len(ALL_GATHERS) + 2))
    found = []
    if not usual.name.startswith("process_group"):
        found.append((usual.name, clock.reducing(usual) + clock.gathering(usual)))
    device = sample(usual).device

    def ways(names: Sequence[str], pattern: str) -> Iterator[tuple[str, Communicator]]:
        for name in names:
            yield name, connect(group, pattern.format(name), device)

    adding = {n: clock.reducing(c) for n, c in ways(sums, "process_group:{}+direct")}
    bringing = {n: clock.gathering(c) for n, c in ways([*ALL_GATHERS], "process_group:direct+{}")}
    add, gather = min(adding, key=adding.__getitem__), min(bringing, key=bringing.__getitem__)
    found.append((f"process_group:{add}+{gather}", adding[add] + bringing[gather]))
    return tuple(sorted((way for way in found if way[1] < math.inf), key=lambda way: way[1]))


class _Clock:
    """Times transports until the time is up; what comes after that counts as slowest."""

    def __init__(self, sample: Callable[[Communicator], Collectives], part: float) -> None:
        """`part`: seconds for each."""
        self._sample, self._part = sample, part
        self._deadline = time.monotonic() + SECONDS

    def reducing(self, comm: Communicator) -> float:
        own = self._sample(comm)
        return self._time(own, own.reduce_scatter)

    def gathering(self, comm: Communicator) -> float:
        own = self._sample(comm)
        return self._time(own, own.all_gather)

    def _time(self, own: Collectives, run: Callable[[Sequence[float]], None]) -> float:
        if self._is_over(own):
            return math.inf
        ranks = own.comm.group.size
        even = (1.0 / ranks,) * ranks
        skewed = (0.5, *(0.5 / (ranks - 1),) * (ranks - 1))
        return sum(own.seconds(run, shares, self._part / 2) for shares in (even, skewed))

    def _is_over(self, own: Collectives) -> bool:
        """As any rank says, so that all of them go the same way."""
        over = torch.tensor([float(time.monotonic() > self._deadline)])
        return any(
            bool(said) for said in own.control.exchange(over, what="the time that is left")()
        )
