"""Clusters of ranks with equal compute and unequal memory limits."""

from __future__ import annotations

from dataclasses import dataclass

from emulation import Ranks
from head_to_head.clusters import Cluster, OpenCluster

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCluster:
    """Memory limits in proportion to a name like `8:4:2:2`."""

    name: str
    limits: tuple[int, ...]
    """Bytes by rank, above what a process holds before it builds a model."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.limits)

    @property
    def ideal_ratio(self) -> float:
        """Sum of the limits over what ranks can use if all need as much as the smallest has."""
        return sum(self.limits) / (self.size * min(self.limits))

    def open(self) -> OpenCluster:
        """For `Workers`: no rank is slowed down; the limits are set by the trial."""
        return open_cluster(self.name, self.size)

    @classmethod
    def of(cls, name: str, largest: int) -> MemoryCluster:
        """The cluster whose largest limit has so many bytes.

        Raises:
            ValueError: not at least two whole numbers above 0, separated by colons.
        """
        parts = name.split(":")
        if len(parts) < 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(
                f"a cluster must be whole numbers and colons, as 8:4:2:2, got {name!r}"
            )
        relative = [int(part) for part in parts]
        return cls(name=name, limits=tuple(largest * part // max(relative) for part in relative))


def open_cluster(name: str, ranks: int) -> OpenCluster:
    """A cluster of ranks that share all cores of this machine."""
    return OpenCluster(Cluster(name=name, cores=(0,) * ranks), Ranks(()), None)
