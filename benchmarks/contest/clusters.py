"""Clusters of unequal ranks on one machine, by name, and how a rank becomes part of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from emulation import EmulatedCluster, EmulationUnavailable, Ranks
from network import EmulatedNetwork, Hosts

FASTEST = 0.9
"""Of a core, for the fastest rank under quotas. Less than all of it: the programs that every
machine runs beside us then take from what nobody was promised."""
CAPPED_PART = 16
"""A memory-capped rank holds at most this part of the global batch in a pass."""
SLOW_LINK = 1e9
"""Bits per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Who is how fast, by quota or by sharing cores, and what else tells ranks apart."""

    name: str
    quotas: tuple[float, ...] = ()
    """Of a core, by rank."""
    cores: tuple[int, ...] = ()
    """By rank, which of the machine's cores it runs on, counted from 0; instead of quotas."""
    capped: tuple[int, ...] = ()
    """Ranks whose memory holds a 16th of the global batch in a pass."""
    hosts: tuple[int, ...] = ()
    """By rank, where there is more than one host: the link between them is slow."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.quotas or self.cores)

    @property
    def unequal(self) -> bool:
        """Ranks differ in speed or memory."""
        neighbours = [self.cores.count(core) for core in self.cores]
        return len({*self.quotas}) > 1 or len({*neighbours}) > 1 or bool(self.capped)

    def cap(self, rank: int, global_batch: int) -> int | None:
        """The largest micro-batch that the rank's memory holds; None: no limit to speak of."""
        return max(1, global_batch // CAPPED_PART) if rank in self.capped else None

    def _allowed_cores(self) -> list[int]:
        """The machine's cores that `cores` mean; a single one may be any.

        Raises:
            EmulationUnavailable: there are fewer than the cluster needs.
        """
        allowed = sorted(os.sched_getaffinity(0))
        used = sorted({*self.cores})
        if len(used) > len(allowed):
            raise EmulationUnavailable(
                f"it takes {len(used)} cores, this process may use {len(allowed)}"
            )
        return [allowed[-len(used) :][used.index(core)] for core in self.cores]

    def __str__(self) -> str:
        if self.quotas:
            said = "CPU quotas of " + " : ".join(f"{quota:.2g}" for quota in self.quotas) + " cores"
        else:
            said = "ranks on cores " + ", ".join(map(str, self.cores)) + " (shared)"
        for rank in self.capped:
            said += f"; rank {rank} holds at most 1/{CAPPED_PART} of the global batch in a pass"
        if self.hosts:
            said += f"; ranks on hosts {', '.join(map(str, self.hosts))}, "
            said += f"{SLOW_LINK / 1e9:g} Gbit/s between them"
        return said

    @contextmanager
    def opened(self) -> Iterator[Place]:
        """Set the cluster up for the time of a `with` block.

        Raises:
            EmulationUnavailable: this machine doesn't let us; says what it would take.
        """
        with ExitStack() as stack:
            hosts = None
            if self.hosts:
                network = EmulatedNetwork(hosts=max(self.hosts) + 1, bits_per_second=SLOW_LINK)
                hosts = stack.enter_context(network)
            if self.quotas:
                emulated = EmulatedCluster.quotas(self.quotas)
            else:
                emulated = EmulatedCluster.core_sharing(self._allowed_cores())
            yield Place(self, stack.enter_context(emulated), hosts)


@dataclass(frozen=True, slots=True)
class Place:
    """An open cluster, as its rank processes need it. A small picklable value."""

    cluster: Cluster
    seats: Ranks
    hosts: Hosts | None

    def connect(self, rank: int) -> None:
        """Join the rank's host: before any socket or thread is made."""
        if self.hosts is not None:
            self.hosts.enter(self.cluster.hosts[rank])
        else:  # serves also where the host's own name resolves to nothing
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def slow_down(self, rank: int) -> None:
        """From here on the calling process is as slow as the rank shall be."""
        self.seats.enter(rank)


def by_quota(name: str, speeds: Sequence[float], **more: tuple[int, ...]) -> Cluster:
    """Ranks of these relative speeds, the fastest with `FASTEST` of a core if there are enough."""
    relative = [speed / max(speeds) for speed in speeds]
    cores = len(os.sched_getaffinity(0))
    scale = min(FASTEST, FASTEST * cores / sum(relative))
    return Cluster(name=name, quotas=tuple(scale * speed for speed in relative), **more)


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster(name="2:1:1", cores=(0, 1, 1)),
        Cluster(name="3:1:1:1", cores=(0, 1, 1, 1)),
        Cluster(name="1:1:1", cores=(1, 1, 1)),
        by_quota("2:1", (2, 1)),
        by_quota("4:1", (4, 1)),
        by_quota("8:1", (8, 1)),
        by_quota("4:2:1", (4, 2, 1)),
        by_quota("2:2:2:1", (2, 2, 2, 1)),
        by_quota("capped", (2, 1), capped=(1,)),
        by_quota("slow-link", (2, 1), hosts=(0, 1)),
    )
}


def find_cluster(name: str) -> Cluster:
    """A cluster of the table, or one by quota for relative speeds like `3:2:2`.

    Raises:
        ValueError: neither.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    try:
        speeds = [float(speed) for speed in name.split(":")]
    except ValueError:
        speeds = []
    if len(speeds) < 2 or min(speeds) <= 0:
        raise ValueError(
            f"cluster {name!r}: give one of {', '.join(CLUSTERS)}, or relative speeds with colons "
            "in between, as 3:2:2"
        )
    return by_quota(name, speeds)
