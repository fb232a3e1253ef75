"""Times the collectives of training on buffers of the model's sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from poplar.comm import Codec, Communicator, Control, Work, connect
from poplar.comm.shard_layout import Layout
from poplar.profile import NetworkProfile
from poplar.profiler.timing import seconds_of

REPETITIONS = 5
"""Timed runs at most; fewer if they are slow."""
MOST_RANKS_ONE_BY_ONE = 8
"""World size up to which each rank's rates are measured; ranks of larger groups count as equal."""
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Reduce-scatters and all-gathers of a whole model, unit by unit, as the engine issues them."""

    comm: Communicator
    control: Control
    numels: Sequence[int]
    """Elements of each flat buffer."""
    wire_dtype: torch.dtype
    value_dtype: torch.dtype
    device: torch.device

    def over(self, transport: str) -> Collectives:
        """The same collectives over another transport. Collective."""
        if transport == self.comm.name:
            return self
        return replace(self, comm=connect(self.control.group, transport, self.device))

    def reduce_scatter(self, shares: Sequence[float]) -> None:
        """Pack and reduce-scatter the gradients of the whole model. Collective."""
        codec = Codec(self.wire_dtype)
        gradient = torch.zeros(max(self.numels), dtype=self.value_dtype, device=self.device)

        def issue(numel: int) -> Work:
            layout = Layout.from_shares(numel, shares)
            bucket = self.comm.buffer(layout, self.wire_dtype, self.device, codec)
            bucket.pack([gradient[:numel]], [0], 1.0)
            own = layout.size(self.comm.group.rank)
            out = torch.empty(own, dtype=torch.float32, device=self.device)
            what = "a reduce-scatter of the profiler"
            return self.comm.reduce_scatter(bucket, out, accumulate=False, what=what)

        self._run(issue)

    def all_gather(self, shares: Sequence[float]) -> None:
        """All-gather the parameters of the whole model. Collective."""

        def issue(numel: int) -> Work:
            values = torch.zeros(numel, dtype=self.value_dtype, device=self.device)
            layout = Layout.from_shares(numel, shares)
            return self.comm.all_gather(values, layout, what="an all-gather of the profiler")

        self._run(issue)

    def _run(self, issue: Callable[[int], Work]) -> None:
        """Issue one collective per buffer; a new one starts when an earlier one is complete."""
        pending: deque[Work] = deque()
        for numel in self.numels:
            pending.append(issue(numel))
            if len(pending) >= _IN_FLIGHT:
                pending.popleft().wait()
        for work in pending:
            work.wait()

    def seconds(
        self,
        collective: Callable[[Collectives, Sequence[float]], None],
        shares: Sequence[float],
        budget: float,
    ) -> float:
        """Seconds on the slowest rank, a median over repetitions. Collective; equal on all ranks.

        Args:
            collective: `Collectives.reduce_scatter` or `Collectives.all_gather`.
            shares: of the layouts.
            budget: seconds. One warm-up run and one timed run always take place.
        """

        def once() -> float:
            self.exchange(0.0)
            return max(self.exchange(seconds_of(lambda: collective(self, shares), self.device)))

        first, taken = once(), [once()]
        while len(taken) < REPETITIONS and first + sum(taken) + taken[-1] < budget:
            taken.append(once())
        return median(taken)

    def exchange(self, value: float) -> list[float]:
        """The values of all ranks, after all ranks have called it."""
        own = torch.tensor([value], dtype=torch.float64, device="cpu")
        return [float(other) for other in self.control.exchange(own, what="timing collectives")()]


def measure_network(collectives: Collectives, budget: float) -> NetworkProfile:
    """Time even shares, then each rank as the only owner, in about `budget` seconds. Collective.

    If one rank owns everything, it receives every reduction and sends every gather. So these times
    give its rates. Ranks count as equal if that would take too long.
    """
    ranks = collectives.comm.group.size
    reduce, gather = Collectives.reduce_scatter, Collectives.all_gather
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
