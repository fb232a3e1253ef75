"""Which ranks share a host, and which of them speak for it to the others."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.comm.shared_segment import CAN_SHARE

MOST = 1 << 20
"""Elements of a piece: it is on its way while the next is added up."""


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flat buffer, which lie in the slice of rank `owner`."""

    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Hosts:
    """Ranks by host; hosts in the order of their first ranks, the ranks of each ascending."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[object]) -> Hosts:
        """From the place of every rank, in rank order."""
        found: dict[object, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    def host_of(self, rank: int) -> int:
        """The number of its host."""
        return next(host for host, ranks in enumerate(self.members) if rank in ranks)

    def duties(self, layout: Layout, host: int) -> list[list[Piece]]:
        """What each rank of a host carries across: all slices of other hosts' ranks, evenly cut.

        What a host reduces for them leaves it once, and what it gathers of them comes in once, each
        piece by the one rank whose duty it is.
        """
        ranks = self.members[host]
        foreign = [
            Piece(rank, *layout.bounds(rank))
            for rank in range(layout.world_size)
            if rank not in ranks
        ]
        return [list(pieces) for pieces in _cut(foreign, len(ranks))]

    def crossing(self, layout: Layout, host: int) -> list[tuple[int, int, Piece]]:
        """Host, rank and piece of everything that ranks of other hosts than this carry."""
        return [
            (other, rank, piece)
            for other, ranks in enumerate(self.members)
            if other != host
            for rank, pieces in zip(ranks, self.duties(layout, other), strict=True)
            for piece in pieces
        ]


def _cut(pieces: Sequence[Piece], ways: int) -> Iterator[Iterator[Piece]]:
    total = sum(piece.numel for piece in pieces)
    step = -(-total // (ways * ALIGNMENT)) * ALIGNMENT
    for way in range(ways):
        yield _between(pieces, way * step, (way + 1) * step)


def _between(pieces: Sequence[Piece], first: int, last: int) -> Iterator[Piece]:
    """What lies between two places of the pieces laid end to end."""
    begin = 0
    for piece in pieces:
        start = piece.start + max(first - begin, 0)
        stop = piece.start + min(last - begin, piece.numel)
        for part in range(start, stop, MOST):
            yield Piece(piece.owner, part, min(part + MOST, stop))
        begin += piece.numel


def place() -> tuple[str, ...]:
    """The host, and the namespaces within which processes and sockets of it see each other.

    Ranks in different network namespaces are told apart because whoever made these wants the
    network between them to be used.
    """
    alone = (platform.node(), str(os.getpid()))
    if not CAN_SHARE:
        return alone
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (host, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")))
    except OSError:  # a container that hides them: nobody could open each other's memory either
        return alone
