"""The cost of a collective over the whole model under any shares.

The direct algorithm (all-to-all, then a local sum) is bound by the busiest link. Profiles measure
it at even shares; under other shares its time follows from the ratios of the ranks' rates:

    reduce-scatter: rank r sends (1 - p[r]) and receives (n - 1) p[r] of the model
    all-gather:     rank r sends (n - 1) p[r] and receives (1 - p[r])

Both are maxima of lines in one share each, so a linear program minimizes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from poplar.profile import NetworkProfile


class Line(NamedTuple):
    """A lower bound on a time: at least `constant + slope * shares[rank]` seconds."""

    rank: int
    constant: float
    slope: float


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of one collective as a function of the shares: the maximum of its lines."""

    least: float
    """Seconds if there are no lines, because rates were not measured."""
    lines: tuple[Line, ...]
    """Empty, or one per rank for its outgoing link, then one per rank for its incoming link."""

    def seconds(self, shares: Sequence[float], ranks: Iterable[int] | None = None) -> float:
        """Seconds when rank `r` owns `shares[r]` of every buffer.

        Args:
            shares: by rank.
            ranks: one rank of each group of equal ranks; None: all ranks.
        """
        lines = self.lines if ranks is None else self.lines_of(ranks)
        bounds = (constant + slope * shares[rank] for rank, constant, slope in lines)
        return max(bounds, default=self.least)

    def lines_of(self, ranks: Iterable[int]) -> Iterator[Line]:
        """The lines of these ranks."""
        half = len(self.lines) // 2
        if half:
            for rank in ranks:
                yield self.lines[rank]
                yield self.lines[half + rank]


@dataclass(frozen=True, slots=True)
class CollectiveCosts:
    """`R(p)` and `G(p)`: the reduce-scatter and the all-gather of the whole model."""

    reduce_scatter: CollectiveCost
    all_gather: CollectiveCost

    @classmethod
    @lru_cache(maxsize=8)  # a search asks for every stage and number of persistent units
    def of(cls, network: NetworkProfile) -> CollectiveCosts:
        """The costs of a measured network."""
        leaving, arriving = network.send_seconds_per_byte, network.receive_seconds_per_byte
        return cls(
            reduce_scatter=_scaled(network.reduce_scatter_seconds, leaving, arriving),
            all_gather=_scaled(network.all_gather_seconds, arriving, leaving),
        )


def _scaled(measured: float, others: Sequence[float], own: Sequence[float]) -> CollectiveCost:
    """Scale lines to a measurement.

    Args:
        measured: seconds at even shares.
        others: by rank, rate of the link that carries everything but the rank's own share.
        own: by rank, rate of the link that carries the rank's own share once per other rank.
    """
    n = len(others)
    lines = [Line(rank, rate, -rate) for rank, rate in enumerate(others)]
    lines += [Line(rank, 0.0, (n - 1) * rate) for rank, rate in enumerate(own)]
    even = max(line.constant + line.slope / n for line in lines)
    if n == 1 or even == 0.0 or measured == 0.0:
        return CollectiveCost(measured, ())
    scale = measured / even
    return CollectiveCost(
        0.0,
        tuple(Line(rank, constant * scale, slope * scale) for rank, constant, slope in lines),
    )
