"""Measures the link between each pair of hosts: its bandwidth, and its latency apart.

One rank of each host exchanges messages with one rank of another, in rounds of a tournament: all
hosts are busy in a round and none is in two pairs, so `hosts` rounds at most measure every pair.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from poplar.comm.host_topology import Hosts, host_id
from poplar.comm.stream_work import StreamWork
from poplar.profiler.session import Session
from poplar.profiler.timing import seconds_of
from poplar.values.profile import LinkProfile

LEAST_BYTES = 8
"""Size of the messages whose time is the latency."""
FIRST_BYTES = 1 << 16
MOST_BYTES = 1 << 28
"""Sizes of the messages that show bandwidth; doubled from the first one on."""
SETTLED = 0.1
"""Relative change of the bandwidth below which larger messages are not tried."""
REPETITIONS = 3
_HOST = torch.device("cpu")
_WHAT = "measuring the links between hosts"


def find_hosts(session: Session) -> Hosts:
    """The ranks by host. Collective."""
    return Hosts.of(session.exchange(host_id()))


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` players once, in rounds that no player is in twice.

    The circle method: one player stays, the others move on by one place each round.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def measure_links(session: Session, hosts: Hosts, budget: float) -> tuple[LinkProfile, ...]:
    """The link of each pair of hosts, in about `budget` seconds. Collective.

    Args:
        session: of this rank.
        hosts: as `find_hosts` returned them.
        budget: seconds for all rounds; two sizes are timed in each round, whatever it is.

    Returns:
        The same on every rank; empty on a single host.
    """
    leaders = [ranks[0] for ranks in hosts.members]
    names = session.exchange(platform.node())
    rounds = tournament(len(leaders))
    found: list[LinkProfile] = []
    for pairs in rounds:
        of_ranks = [(leaders[a], leaders[b]) for a, b in pairs]
        swap = Messages(session, of_ranks).seconds
        measured = measure_pairs(swap, session.exchange, of_ranks, budget / len(rounds))
        for (a, b), (latency, per_byte) in zip(of_ranks, measured, strict=True):
            found.append(
                LinkProfile(
                    hosts=(names[a], names[b]),
                    latency_seconds=latency,
                    seconds_per_byte=per_byte,
                )
            )
    return tuple(found)


def measure_pairs(
    swap: Callable[[int], float],
    exchange: Callable[[float], list[float]],
    pairs: Sequence[tuple[int, int]],
    budget: float,
) -> list[tuple[float, float]]:
    """Latency, and seconds per byte of messages that are large enough to show bandwidth.

    Args:
        swap: this rank's seconds of an exchange of so many bytes with its partner, both ways at
            once. All ranks call it for the same sizes, also those without a partner.
        exchange: the values of all ranks.
        pairs: of ranks.
        budget: seconds.
    """

    def timed(size: int) -> list[float]:
        by_rank = exchange(swap(size))
        return [max(by_rank[a], by_rank[b]) for a, b in pairs]

    swap(LEAST_BYTES)  # connects the pairs
    began = time.perf_counter()
    latencies, rates, size = timed(LEAST_BYTES), [math.inf] * len(pairs), FIRST_BYTES
    while True:
        seconds, before = timed(size), rates
        rates = [each / size for each in seconds]
        changes = (abs(old / new - 1.0) for old, new in zip(before, rates, strict=True))
        is_over = any(exchange(time.perf_counter() - began >= budget))
        if is_over or size >= MOST_BYTES or max(changes) < SETTLED:
            break
        size *= 2
    # A message takes its latency and then its bytes; noise may make a short one take longer.
    moving = [max(s - latency, s / 2) for s, latency in zip(seconds, latencies, strict=True)]
    return [(latency, s / size) for latency, s in zip(latencies, moving, strict=True)]


class Messages:
    """Messages between pairs of ranks: an all-to-all in which each rank sends to its partner."""

    def __init__(self, session: Session, pairs: Sequence[tuple[int, int]]) -> None:
        self._group = group = session.group
        partners = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        self._partner = partners.get(group.rank)
        on_device = group.supports(session.device)
        self._device = session.device if on_device else _HOST
        self._waits_on_stream = not group.is_on_host(self._device) and on_device
        usable = on_device or group.is_on_host(_HOST)
        self._process_group = group.process_group if usable else group.control_group

    def seconds(self, size: int) -> float:
        """The median over `REPETITIONS` exchanges of `size` bytes. Collective.

        Raises:
            CollectiveTimeout: the partner did not answer.
        """
        splits = [size * (rank == self._partner) for rank in range(self._group.size)]
        sent = torch.zeros(sum(splits), dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)

        group = self._process_group
        call = partial(
            dist.all_to_all_single, received, sent, splits, splits, group=group, async_op=True
        )

        def run_on_stream() -> None:
            # With a timeout NCCL's wait looks once a millisecond, far longer than a message takes.
            StreamWork(self._group, call, self._device, _WHAT).wait()

        def run_on_host() -> None:
            try:
                work = call()
                assert work is not None
                work.wait(self._group.timeout)
            except RuntimeError as error:
                peers = [rank for rank, own in enumerate(splits) if own]
                raise self._group.timeout_error(_WHAT, peers, str(error)) from error

        run = run_on_stream if self._waits_on_stream else run_on_host
        taken = median(seconds_of(run, self._device) for _ in range(REPETITIONS))
        self._group.check()  # the device also goes on after an abort
        return taken
