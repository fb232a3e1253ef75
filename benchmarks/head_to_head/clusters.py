"""Emulated clusters of unequal ranks on one machine, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from emulation import EmulationUnavailable, Ranks, core_sharing, cpu_quotas, quotas_of
from network import Hosts, emulated_network

FASTEST = 0.9
"""Fraction of a core for the fastest rank under quotas. The rest is left to other programs."""
CAPPED_PART = 16
"""A memory-capped rank holds at most this part of the global batch in a pass."""
SLOW_LINK = 1e9
"""Bits per second."""
RATES = {"1G": SLOW_LINK, "100M": 1e8}
"""Links between hosts, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Speed of each rank, by CPU quota or shared cores, and limits of memory and network."""

    name: str
    quotas: tuple[float, ...] = ()
    """Fraction of a core, by rank."""
    cores: tuple[int, ...] = ()
    """Core of each rank, counted from 0; instead of quotas."""
    capped: tuple[int, ...] = ()
    """Ranks that can hold only a 16th of the global batch in a pass."""
    hosts: tuple[int, ...] = ()
    """Host of each rank, if there are several; the links between them are slow."""
    link: float = SLOW_LINK
    """Bits per second of each host's link."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.quotas or self.cores)

    @property
    def unequal(self) -> bool:
        """Ranks differ in speed or memory."""
        ranks_on_core = [self.cores.count(core) for core in self.cores]
        return len({*self.quotas}) > 1 or len({*ranks_on_core}) > 1 or bool(self.capped)

    def cap(self, rank: int, global_batch: int) -> int | None:
        """The largest micro-batch that the rank can hold; None: no limit."""
        return max(1, global_batch // CAPPED_PART) if rank in self.capped else None

    def _allowed_cores(self) -> list[int]:
        """The machine's cores for `cores`.

        Raises:
            EmulationUnavailable: this process may use fewer cores than the cluster needs.
        """
        allowed = sorted(os.sched_getaffinity(0))
        used = sorted({*self.cores})
        if len(used) > len(allowed):
            raise EmulationUnavailable(
                f"the cluster needs {len(used)} cores, this process may use {len(allowed)}"
            )
        return [allowed[-len(used) :][used.index(core)] for core in self.cores]

    def __str__(self) -> str:
        if self.quotas:
            text = "CPU quotas of " + " : ".join(f"{quota:.2g}" for quota in self.quotas) + " cores"
        else:
            text = "ranks on cores " + ", ".join(map(str, self.cores)) + " (shared)"
        for rank in self.capped:
            text += f"; rank {rank} holds at most 1/{CAPPED_PART} of the global batch in a pass"
        if self.hosts:
            text += f"; ranks on hosts {', '.join(map(str, self.hosts))}, "
            text += f"{self.link / 1e9:g} Gbit/s between them"
        return text

    @contextmanager
    def opened(self) -> Iterator[OpenCluster]:
        """Set up the cluster for the time of a `with` block.

        Raises:
            EmulationUnavailable: this machine does not allow it; the message says what is missing.
        """
        with ExitStack() as stack:
            hosts = None
            if self.hosts:
                network = emulated_network(hosts=max(self.hosts) + 1, bits_per_second=self.link)
                hosts = stack.enter_context(network)
            if self.quotas:
                emulated = cpu_quotas(self.quotas)
            else:
                emulated = core_sharing(self._allowed_cores())
            yield OpenCluster(self, stack.enter_context(emulated), hosts)


@dataclass(frozen=True, slots=True)
class OpenCluster:
    """An open cluster. A small picklable value for the rank processes."""

    cluster: Cluster
    ranks: Ranks
    hosts: Hosts | None

    def connect(self, rank: int) -> None:
        """Join the rank's host. Call it before any socket or thread is created."""
        if self.hosts is not None:
            self.hosts.enter(self.cluster.hosts[rank])
        else:  # also works where the host name does not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def slow_down(self, rank: int) -> None:
        """Apply the rank's speed to the calling process."""
        self.ranks.enter(rank)


def free_ranks(count: int) -> OpenCluster:
    """Ranks that share all cores of this machine."""
    return OpenCluster(Cluster(name="free", cores=(0,) * count), Ranks(()), None)


def by_quota(name: str, speeds: Sequence[float], **more: Any) -> Cluster:
    """Ranks of these relative speeds; the fastest gets `FASTEST` of a core if cores suffice."""
    return Cluster(name=name, quotas=quotas_of(speeds, FASTEST), **more)


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
    """A named cluster, or one by quota for relative speeds like `3:2:2`.

    `3:2:2@1G` has each rank on a host of its own, with a link of this rate (`RATES`).

    Raises:
        ValueError: the name is neither.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    relative, at, rate = name.partition("@")
    try:
        speeds = [float(speed) for speed in relative.split(":")]
    except ValueError:
        speeds = []
    if len(speeds) < 2 or min(speeds) <= 0 or (at and rate not in RATES):
        raise ValueError(
            f"cluster {name!r}: give one of {', '.join(CLUSTERS)}, or relative speeds with colons "
            f"in between, as 3:2:2, and maybe a link of {' or '.join(RATES)}, as 3:2:2@1G"
        )
    if at:
        return by_quota(name, speeds, hosts=tuple(range(len(speeds))), link=RATES[rate])
    return by_quota(name, speeds)
