"""Which ranks share a host, and the routes of a flat buffer over hosts.

Each rank of a host handles its own slice and the parts of other hosts' slices that it relays
(`Hosts.relay_assignments`). A route is computed once for each layout.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from poplar.comm.host_memory.segment import CAN_SHARE
from poplar.comm.shard_layout import ALIGNMENT, Bounds, Layout


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


@dataclass(frozen=True)
class Route:
    """The route of one layout, as one rank sees it. All numbers are elements."""

    by_rank: tuple[tuple[Bounds, ...], ...]
    """By rank of this host: its own slice and, behind it, the parts that it relays."""
    host_layout: Layout
    """The sizes of these, by rank of this host."""
    parts: tuple[Bounds, ...]
    """The buffer's elements in the order of `host_layout`; adjacent parts are one."""
    relayed: list[int]
    """By rank of the group, elements of its slice that this rank relays."""
    relays: list[int]
    """By rank of the group, elements of this rank's slice that it relays."""
    sent: tuple[Bounds, ...]
    """The elements of this rank's slice, counted from its start, in the order of `relays`."""
    by_host: tuple[tuple[Bounds, ...], ...]
    """By host, where its parts of this rank's slice lie in what all relays send to this rank: in
    the order of ranks. The parts of a host are in the order of the slice."""

    @classmethod
    def of(cls, hosts: Hosts, layout: Layout, rank: int) -> Route:
        """The route of `rank`."""
        host = hosts.host_of(rank)
        assignments = [
            hosts.relay_assignments(layout, other) for other in range(len(hosts.members))
        ]
        relayed, relays = [0] * layout.world_size, [0] * layout.world_size
        for ranks, assignment in zip(hosts.members, assignments, strict=True):
            for relay, pieces in zip(ranks, assignment, strict=True):
                relays[relay] = sum(piece.numel for piece in pieces if piece.owner == rank)
                for piece in pieces if relay == rank else ():
                    relayed[piece.owner] += piece.numel
        by_rank = tuple(
            (layout.bounds(peer), *((piece.start, piece.stop) for piece in pieces))
            for peer, pieces in zip(hosts.members[host], assignments[host], strict=True)
        )
        sizes = [sum(stop - start for start, stop in parts) for parts in by_rank]
        received = list(pairwise(accumulate(relays, initial=0)))
        places: dict[int, Bounds] = {}
        for ranks in hosts.members:
            bounds = pairwise(accumulate((relays[relay] for relay in ranks), initial=0))
            places |= zip(ranks, bounds, strict=True)
        return cls(
            by_rank=by_rank,
            host_layout=Layout((0, *accumulate(sizes))),
            parts=_joined(bounds for parts in by_rank for bounds in parts),
            relayed=relayed,
            relays=relays,
            sent=_joined(places[relay] for relay in sorted(places)),
            by_host=tuple(_joined(received[peer] for peer in ranks) for ranks in hosts.members),
        )


def _joined(bounds: Iterable[Bounds]) -> tuple[Bounds, ...]:
    """Without empty ones; those that follow one another are one."""
    joined: list[Bounds] = []
    for start, stop in bounds:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


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
