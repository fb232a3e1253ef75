"""Times the collectives of training on buffers of the model's sizes, over the default transport."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from poplar.comm import Communicator, Work, connect
from poplar.comm.host_memory.segment import caches_memory
from poplar.comm.host_topology import Hosts, host_id
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.profiler.model_profile import flat_numels
from poplar.profiler.session import Session
from poplar.profiler.timing import seconds_of
from poplar.values.errors import agreed
from poplar.values.formatting import format_bytes
from poplar.values.profile import NetworkProfile

REPETITIONS = 5
"""Timed runs at most; fewer if they are slow."""
MOST_ELEMENTS = 1 << 26
"""Elements that a collective is timed with, at most: buffers of larger models are sampled."""
MOST_ELEMENTS_AT_ONCE = 1 << 24
"""Largest buffer that is timed. A rank that owns everything receives it from every rank."""
FEWEST_ELEMENTS_AT_ONCE = 1 << 14
"""Buffers of large parameters are timed in parts of this size at least, however little is free."""
MOST_RANKS_ONE_BY_ONE = 8
"""World size up to which each rank's rates are measured; larger groups are measured by host."""
MOST_HOSTS_ONE_BY_ONE = 64
"""Hosts up to which the rates are measured."""
SMALL_BUFFERS = 4
"""Buffers with which the latency of a collective is measured."""
IN_FLIGHT = 2


@dataclass(frozen=True)
class Collectives:
    """Reduce-scatters and all-gathers over one transport. All methods are collective."""

    session: Session
    comm: Communicator
    numels: Sequence[int]
    """Elements of each flat buffer of the model."""

    @cached_property
    def _gradient(self) -> Tensor:
        dtype, device = self.session.compute_dtype, self.session.device
        return torch.zeros(max(self.numels), dtype=dtype, device=device)

    def reduce_scatter(self, layout: Layout) -> Work:
        """Pack the gradient of a buffer and issue its reduction."""
        device, wire_dtype = self.session.device, self.session.job.reduce_dtype
        bucket = self.comm.buffer(layout, wire_dtype, device)
        bucket.pack([self._gradient[: layout.numel]], [0], 1.0)
        own = layout.size(self.comm.group.rank)
        out = torch.empty(own, dtype=torch.float32, device=device)
        what = "a reduce-scatter of the profiler"
        return self.comm.reduce_scatter(bucket, out, accumulate=False, what=what)

    def all_gather(self, layout: Layout) -> Work:
        """Issue the gather of the parameters of a buffer."""
        values = torch.zeros_like(self._gradient[: layout.numel])
        return self.comm.all_gather(values, layout, what="an all-gather of the profiler")

    def seconds(self, issue: Issue, shares: Sequence[float], budget: float) -> float:
        """Seconds of a collective on all buffers, as the engine issues it.

        Args:
            issue: `Collectives.reduce_scatter` or `Collectives.all_gather`.
            budget: seconds. One run that is not timed and one timed run always take place.

        Returns:
            The median of the runs, each on the slowest rank; equal on all ranks.
        """
        layouts = [Layout.from_shares(numel, shares) for numel in self.numels]

        def run() -> None:
            pending: deque[Work] = deque()
            for layout in layouts:
                if len(pending) == IN_FLIGHT:
                    pending.popleft().wait()
                pending.append(issue(self, layout))
            for work in pending:
                work.wait()

        def once() -> float:
            self.session.exchange(None)
            return max(self.session.exchange(seconds_of(run, self.session.device)))

        first, taken = once(), [once()]
        while len(taken) < REPETITIONS and first + sum(taken) + taken[-1] < budget:
            taken.append(once())
        for _ in range(2):  # `end_step` keeps what was used since the last call
            self.comm.end_step()
        return median(taken)

    def both_seconds(self, shares: Sequence[float], budget: float) -> list[float]:
        """`seconds` of the reduce-scatters and of the all-gathers."""
        both = Collectives.reduce_scatter, Collectives.all_gather
        return [self.seconds(issue, shares, budget) for issue in both]

    def rates(
        self, owners: Sequence[Sequence[int]], part: float, budget: float
    ) -> list[tuple[float, float]]:
        """By rank, seconds per byte that it receives and that it sends.

        Ranks that own everything receive every reduction and send every gather. The bytes are those
        that `CollectiveCosts` counts for these shares: of the tensors that are sent, and between
        hosts if the transport is hierarchical.

        Args:
            owners: groups of ranks, one of which owns everything at a time; the ranks of a host
                share its network. None: all rates are 1.
            part: of each buffer, which is reduced and gathered.
            budget: seconds for each collective.
        """
        session, hosts, ranks = self.session, self.comm.hosts, self.session.group.size
        bytes_reduced = session.job.reduce_dtype.itemsize
        bytes_gathered = session.compute_dtype.itemsize
        rates = [(1.0, 1.0)] * ranks
        parts = (max(min(n, FEWEST_ELEMENTS_AT_ONCE), int(n * part)) for n in self.numels)
        sample = replace(self, numels=[n + -n % ALIGNMENT for n in parts])
        for group in owners:
            copies = len(set(hosts)) - 1 if hosts else (ranks - 1) / len(group)
            moved = copies * sum(sample.numels)
            shares = [(rank in group) / len(group) for rank in range(ranks)]
            receiving, sending = sample.both_seconds(shares, budget)
            for rank in group:
                rates[rank] = (
                    receiving / (moved * bytes_reduced),
                    sending / (moved * bytes_gathered),
                )
        return rates

    def latencies(self, budget: float) -> tuple[float, ...]:
        """`NetworkProfile.collective_latency_seconds`, in about `budget` seconds. Collective."""
        ranks = self.session.group.size
        small = replace(self, numels=[ranks * ALIGNMENT] * SMALL_BUFFERS)
        even = (1.0 / ranks,) * ranks
        return tuple(each / SMALL_BUFFERS for each in small.both_seconds(even, budget / 2))


Issue = Callable[[Collectives, Layout], Work]
"""Issues a collective on one buffer."""


def sampled_collectives(session: Session) -> tuple[Collectives, float]:
    """The collectives of the model, or of a sample of it, and how much more the model has.
    Collective.
    """
    comm = connect(session.group, "auto", session.device)
    numels = flat_numels(session)
    numels, scale = sample_buffers(numels, _largest_buffer(session, max(numels)))
    return Collectives(session, comm, numels), scale


def measure_network(session: Session, budget: float) -> NetworkProfile:
    """Time even shares, and what gives the rates, in about `budget` seconds. Collective."""
    collectives, scale = sampled_collectives(session)
    comm = collectives.comm
    ranks = session.group.size
    owners: list[tuple[int, ...]] = [(rank,) for rank in range(ranks)]
    if ranks > MOST_RANKS_ONE_BY_ONE:
        owners = list(find_hosts(session).members)
    if not 1 < len(owners) <= MOST_HOSTS_ONE_BY_ONE:
        owners = []
    part = budget / (2 * len(owners) + 4)
    reducing, gathering = collectives.both_seconds((1.0 / ranks,) * ranks, part)
    # All moves through the link of one owner, so it may take as many times as long as even shares.
    sampled = part / max(part, len(owners) * reducing, len(owners) * gathering)
    rates = collectives.rates(owners, sampled, part)
    host_buffers = "kept" if caches_memory() else "step"
    return NetworkProfile(
        reduce_scatter_seconds=reducing * scale,
        all_gather_seconds=gathering * scale,
        receive_seconds_per_byte=tuple(receive for receive, _ in rates),
        send_seconds_per_byte=tuple(send for _, send in rates),
        receive_buffers=host_buffers if session.device.type == "cpu" else "freed",
        hosts=comm.hosts,
        transport=comm.name if ranks > 1 and session.group.supports(session.device) else None,
        collective_latency_seconds=collectives.latencies(part) if ranks > 1 else (),
        within_host_seconds=tuple(scale * each for each in _within_hosts(collectives, part)),
    )


def _within_hosts(collectives: Collectives, budget: float) -> list[float]:
    """Both collectives among the ranks of each host; empty if they need not be told apart."""
    session = collectives.session
    members = find_hosts(session).members
    if len(members) == 1 or len(members) == session.group.size:
        return []
    group = session.group.split(members)
    within = replace(collectives, comm=connect(group, "auto", session.device))
    return within.both_seconds((1.0 / group.size,) * group.size, budget / 2)


def find_hosts(session: Session) -> Hosts:
    """The ranks by host. Collective."""
    return Hosts.of(session.exchange(host_id()))


def _largest_buffer(session: Session, wanted: int) -> int:
    """Elements of the largest buffer for which all ranks have memory, at most the constant.

    A rank without memory in the middle of a collective would leave the others waiting, so the ranks
    allocate as many bytes first.

    Args:
        wanted: elements of the largest flat buffer; if fewer are returned, it is timed in parts.

    Raises:
        torch.OutOfMemoryError: not even `FEWEST_ELEMENTS_AT_ONCE` fit; the same on all ranks.
    """
    # Gradients of four sets of collectives; and, for each collective in flight, a bucket, its
    # result, and a part as large as the bucket from every rank: one rank owns everything.
    bytes_each = 4 * (4 + IN_FLIGHT * (2 + session.group.size))
    fitting = min(map(session.memory.spare, range(session.group.size))) / bytes_each
    largest = int(min(MOST_ELEMENTS_AT_ONCE, max(FEWEST_ELEMENTS_AT_ONCE, fitting)))
    largest = max(FEWEST_ELEMENTS_AT_ONCE, min(largest, wanted + -wanted % ALIGNMENT))

    def allocate() -> None:
        torch.empty(largest * bytes_each, dtype=torch.uint8, device=session.device)

    while not session.fits_on_all_ranks(allocate, "allocating buffers for the collectives"):
        if largest <= FEWEST_ELEMENTS_AT_ONCE:
            raise agreed(
                torch.OutOfMemoryError(
                    f"a rank has no {format_bytes(largest * bytes_each)} for timing the "
                    "collectives; free memory on it, or give it more"
                )
            )
        largest = max(FEWEST_ELEMENTS_AT_ONCE, largest // 2)
    return largest - largest % ALIGNMENT


def sample_buffers(
    numels: Sequence[int], largest: int = MOST_ELEMENTS_AT_ONCE
) -> tuple[list[int], float]:
    """Buffers that stand for those of a model, and how much more the model has.

    The seconds of a collective on the model are those on the sample, times this factor. The sample
    has at most `MOST_ELEMENTS` elements: every buffer of a small model, every second, third, ...
    buffer by size of a large one. Buffers above `largest` are sampled as parts.
    """
    parts = [min(largest, n - begin) for n in numels for begin in range(0, n, largest)]
    step = math.ceil(sum(parts) / MOST_ELEMENTS)
    if step == 1:
        return parts, 1.0
    ranked = sorted(parts)
    while sum(ranked[step // 2 :: step]) > MOST_ELEMENTS:
        step += 1
    sample = ranked[step // 2 :: step]
    return sample, sum(parts) / sum(sample)
