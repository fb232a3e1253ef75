"""The collectives that training will use, timed on the model's own buffers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from poplar.comm import Codec, Communicator, Control, Work
from poplar.comm.shard_layout import Layout
from poplar.profile import NetworkProfile

REPETITIONS = 5
"""At most; of slow collectives fewer."""
MOST_RANKS_ONE_BY_ONE = 8
"""Up to here each rank's own rates are measured; beyond, ranks count as equal."""
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Reduces and gathers a whole model, unit by unit, as the engine does."""

    comm: Communicator
    control: Control
    numels: Sequence[int]
    """Elements of each flat buffer."""
    wire_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device

    def reduce_scatter(self, shares: Sequence[float]) -> None:
        """Pack, send and add the gradients of the whole model. Collective."""
        codec = Codec(self.wire_dtype)
        gradient = torch.zeros(max(self.numels), dtype=self.value_dtype, device=self.device)
        pending: deque[Work] = deque()
        for numel in self.numels:
            layout = Layout.from_shares(numel, shares)
            bucket = self.comm.buffer(layout, self.wire_dtype, self.device, codec)
            bucket.pack([gradient[:numel]], [0], 1.0)
            own = layout.size(self.comm.group.rank)
            out = torch.empty(own, dtype=torch.float32, device=self.device)
            what = "a reduction of the profiler"
            pending.append(self.comm.reduce_scatter(bucket, out, accumulate=False, what=what))
            if len(pending) >= _IN_FLIGHT:
                pending.popleft().wait()
        for left in pending:
            left.wait()

    def all_gather(self, shares: Sequence[float]) -> None:
        """Bring the values of the whole model to every rank. Collective."""
        pending: deque[Work] = deque()
        for numel in self.numels:
            values = torch.zeros(numel, dtype=self.value_dtype, device=self.device)
            layout = Layout.from_shares(numel, shares)
            pending.append(self.comm.all_gather(values, layout, what="a gather of the profiler"))
            if len(pending) >= _IN_FLIGHT:
                pending.popleft().wait()
        for left in pending:
            left.wait()

    def seconds(
        self,
        run: Callable[[Sequence[float]], None],
        shares: Sequence[float],
        budget: float,
    ) -> float:
        """Of the slowest rank, a median over repetitions. Collective; the same on all ranks.

        Args:
            run: a method of this object.
            shares: of the layouts.
            budget: seconds; a run to warm up and one that counts are taken in any case.
        """
        first, taken = self._once(run, shares), [self._once(run, shares)]
        while len(taken) < REPETITIONS and first + sum(taken) + taken[-1] < budget:
            taken.append(self._once(run, shares))
        return median(taken)

    def _once(self, run: Callable[[Sequence[float]], None], shares: Sequence[float]) -> float:
        self._synchronize()
        self.control.exchange(torch.zeros(1), what="the profiler's start line")()
        began = time.perf_counter()
        run(shares)
        self._synchronize()
        own = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        everyones = self.control.exchange(own, what="the profiler's times")()
        return max(float(seconds) for seconds in everyones)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_network(collectives: Collectives, budget: float) -> NetworkProfile:
    """Even shares, then each rank as the only owner, within about `budget` seconds. Collective.

    Where one rank owns all, every reduction ends in it and every gather starts from it: these times
    are its rates, of receiving and of sending. Ranks count as equal where that would take too long.
    """
    ranks = collectives.comm.group.size
    reduce, gather = collectives.reduce_scatter, collectives.all_gather
    even = (1.0 / ranks,) * ranks
    part = budget / (2 * ranks + 2)
    reducing = collectives.seconds(reduce, even, part)
    gathering = collectives.seconds(gather, even, part)
    receive, send = [1.0] * ranks, [1.0] * ranks
    affordable = 2 * max(reducing, gathering) <= part
    if 1 < ranks <= MOST_RANKS_ONE_BY_ONE and affordable:
        moved = (ranks - 1) * 4.0 * sum(collectives.numels)
        for rank in range(ranks):
            sole = tuple(float(other == rank) for other in range(ranks))
            receive[rank] = collectives.seconds(reduce, sole, part) / moved
            send[rank] = collectives.seconds(gather, sole, part) / moved
    return NetworkProfile(
        reduce_scatter_seconds=reducing,
        all_gather_seconds=gathering,
        send_seconds_per_byte=tuple(send),
        receive_seconds_per_byte=tuple(receive),
    )
