"""Costs of programmes for tests: ranks of given speeds, and one rate for all links."""

from __future__ import annotations

from poplar.programmes.search.costs import ClusterCosts, Links, RankSeconds


def programme_costs(
    ratios: tuple[int, ...],
    operations_per_second: tuple[float, ...],
    bytes_per_second: float,
    latency: float = 0.0,
) -> ClusterCosts:
    """Costs without a part of a pass that is not divided."""
    ranks = len(ratios)
    links = Links((1.0 / bytes_per_second,) * ranks, (1.0 / bytes_per_second,) * ranks, latency)
    return ClusterCosts(
        ratios=ratios,
        compute=RankSeconds((0.0,) * ranks, tuple(1.0 / own for own in operations_per_second)),
        work=1.0,
        reducing=links,
        moving=links,
        element_seconds=2.0 * (1.0 - 1.0 / ranks) * 4.0 / bytes_per_second,
    )
