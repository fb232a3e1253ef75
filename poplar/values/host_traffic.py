"""What a collective moves through links and networks: flat, or hierarchical over hosts.

The transports, the cost model and the simulated clusters share these formulas. A test compares them
with the bytes that the transports send. A host owns `P` of a buffer and has `g` of `n` ranks on `H`
hosts. A reduce-scatter moves, in units of the buffer,

                    leaving the host    arriving at the host
    flat            g (1 - P)           (n - g) P
    hierarchical    1 - P               (H - 1) P

An all-gather moves the same in the opposite direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one reduce-scatter moves through a link or network, in the unit of the shares."""

    leaving: float
    arriving: float

    @property
    def busiest(self) -> float:
        """The larger direction, as both are used at the same time."""
        return max(self.leaving, self.arriving)


def network_traffic(shares: Sequence[Sequence[float]], *, hierarchical: bool) -> list[Traffic]:
    """Traffic through the network of each host.

    Args:
        shares: by host and rank, what the rank owns: fractions, elements or bytes.
        hierarchical: whether the ranks of a host add their values first.
    """
    owned = [fsum(ranks) for ranks in shares]
    total, world_size = fsum(owned), sum(map(len, shares))
    traffic = []
    for ranks, own in zip(shares, owned, strict=True):
        copies = 1 if hierarchical else len(ranks)
        others = len(shares) - 1 if hierarchical else world_size - len(ranks)
        traffic.append(Traffic(copies * (total - own), others * own))
    return traffic


def link_traffic(shares: Sequence[Sequence[float]], *, hierarchical: bool) -> list[list[Traffic]]:
    """Traffic through the link of each rank, by host; with `hierarchical` within its host only.

    The ranks of a host relay equal parts of what the other hosts own.
    """
    total, world_size = fsum(map(fsum, shares)), sum(map(len, shares))
    traffic = []
    for ranks in shares:
        relayed = (total - fsum(ranks)) / len(ranks) if hierarchical else 0.0
        others = (len(ranks) if hierarchical else world_size) - 1
        traffic.append([Traffic(total - s - relayed, others * (s + relayed)) for s in ranks])
    return traffic


def is_hierarchical(ranks_by_host: Sequence[int]) -> bool:
    """Whether the hierarchical transport is the default: if it relieves the network of a host.

    It does if some of several hosts have several ranks, and never loads a network more. With two
    hosts of which one has a single rank, the busiest network carries the same at even shares, and
    less if that rank owns more.
    """
    return len(ranks_by_host) > 1 and max(ranks_by_host) > 1
