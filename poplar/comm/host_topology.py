"""Which ranks share a host, and which rank relays which data between hosts."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poplar.comm.host_memory.segment import CAN_SHARE
from poplar.comm.shard_layout import ALIGNMENT, Layout


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flat buffer, within the slice of rank `owner`."""

    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Hosts:
    """Ranks by host. Hosts are ordered by their first rank, and the ranks of each ascend."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_ids: Sequence[object]) -> Hosts:
        """Group the ranks by the host id of each rank, given in rank order."""
        found: dict[object, list[int]] = {}
        for rank, host_id in enumerate(host_ids):
            found.setdefault(host_id, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def by_rank(self) -> tuple[int, ...]:
        """The index of each rank's host."""
        return tuple(self.host_of(rank) for rank in range(sum(map(len, self.members))))

    def host_of(self, rank: int) -> int:
        """The index of the rank's host."""
        return next(host for host, ranks in enumerate(self.members) if rank in ranks)

    def relay_assignments(self, layout: Layout, host: int) -> list[list[Piece]]:
        """For each rank of a host, the pieces of other hosts' slices that it relays, evenly split.

        Each piece is relayed by one rank, so each byte crosses the network between two hosts once
        per direction.
        """
        ranks = self.members[host]
        remote = [rank for rank in range(layout.world_size) if rank not in ranks]
        total = sum(layout.size(rank) for rank in remote)
        step = -(-total // (len(ranks) * ALIGNMENT)) * ALIGNMENT
        pieces: list[list[Piece]] = [[] for _ in ranks]
        assigned = 0
        for owner in remote:
            start, end = layout.bounds(owner)
            while start < end:
                relay = assigned // step
                stop = min(end, start + (relay + 1) * step - assigned)
                pieces[relay].append(Piece(owner, start, stop))
                assigned, start = assigned + stop - start, stop
        return pieces


def host_id() -> tuple[str, ...]:
    """Identifies the host and the PID and network namespaces of this process.

    Ranks in different network namespaces count as different hosts: namespaces are created in order
    to use the network between them.
    """
    unshared = (platform.node(), str(os.getpid()))
    if not CAN_SHARE:
        return unshared
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (host, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")))
    except OSError:  # in such a container, processes cannot open each other's memory either
        return unshared
