"""The cost of a collective over the whole model under any shares.

The direct algorithm (all-to-all, then a local sum) is bound by the busiest link. Profiles measure
it at even shares; under other shares its time follows from the ratios of the ranks' rates:

    reduce-scatter: rank r sends (1 - p[r]) and receives (n - 1) p[r] of the model
    all-gather:     rank r sends (n - 1) p[r] and receives (1 - p[r])

Both are maxima of lines in one share each, so a linear program minimizes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from poplar.profile import NetworkProfile


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of one collective as a function of the shares: the maximum of its lines."""

    least: float
    """Seconds under any shares: the measurement, if rates were not measured."""
    others: tuple[float, ...]
    """By rank, seconds of the link that carries all shares but the rank's own: `(1 - p[r])`."""
    own: tuple[float, ...]
    """By rank, seconds of the link that carries the rank's own share: `p[r]`."""

    def seconds(self, shares: Sequence[float]) -> float:
        """Seconds when rank `r` owns `shares[r]` of every buffer."""
        distinct = set(zip(self.others, self.own, shares, strict=True))
        links = (max(others * (1.0 - share), own * share) for others, own, share in distinct)
        return max(self.least, *links)

    def lines(self, rank: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """The seconds of this rank's links: constants, and slopes in its share."""
        return (self.others[rank], -self.others[rank]), (0.0, self.own[rank])


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
    own = [(n - 1) * rate for rate in own]
    even = max(*(rate - rate / n for rate in others), *(rate / n for rate in own))
    if n == 1 or even == 0.0:
        return CollectiveCost(measured, (0.0,) * n, (0.0,) * n)
    scale = measured / even
    return CollectiveCost(
        0.0, tuple(rate * scale for rate in others), tuple(rate * scale for rate in own)
    )
