"""The cost of a collective over the whole model under any shares.

The direct algorithm (all-to-all, then a local sum) is bound by the busiest link. Profiles measure
it at even shares; under other shares its time follows from the ratios of the ranks' rates:

    reduce-scatter: rank r sends (1 - p[r]) and receives (n - 1) p[r] of the model
    all-gather:     rank r sends (n - 1) p[r] and receives (1 - p[r])

The hierarchical transport moves data within each host, and then between hosts: two levels, one
after the other. `poplar.values.host_traffic` has what each moves. All of these are lines in a
rank's share and in the share of its host, so a linear program minimizes their maximum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from poplar.values.profile import NetworkProfile


class Line(NamedTuple):
    """Seconds of one link or network as a function of a rank's share and of its host's share."""

    constant: float
    rank: float
    host: float = 0.0

    def at(self, share: float, host_share: float) -> float:
        """Seconds under these shares."""
        return self.constant + self.rank * share + self.host * host_share

    def times(self, factor: float) -> Line:
        """The line with `factor` times the seconds."""
        return Line(factor * self.constant, factor * self.rank, factor * self.host)


Level = tuple[tuple[Line, ...], ...]
"""By rank, the lines of its links; the busiest one takes the time."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of one collective as a function of the shares."""

    least: float
    """Seconds under any shares: the measurement, if rates were not measured."""
    levels: tuple[Level, ...]
    """One after the other."""
    hosts: tuple[int, ...] = ()
    """By rank, the number of its host. Empty: no line depends on hosts."""
    latency: float = 0.0
    """Seconds of a small buffer; 0 if not measured."""
    bandwidth_part: float = 1.0
    """Of the seconds of the model, the part that is not latency."""

    @property
    def link_seconds(self) -> list[tuple[float, float]] | None:
        """By rank, seconds in which its link sends as many bytes as the model has, and receives
        them. None if the rates were not measured, ranks share links, or there is only one rank.
        """
        if len(self.levels) != 1 or self.hosts or self.least > 0.0:
            return None
        others = len(self.levels[0]) - 1
        if not others:
            return None
        return [(out.constant, into.rank / others) for out, into in self.levels[0]]

    def seconds(self, shares: Sequence[float]) -> float:
        """Seconds when rank `r` owns `shares[r]` of every buffer."""
        host_shares = [0.0] * len(shares)
        if self.hosts:
            owned = dict.fromkeys(self.hosts, 0.0)
            for host, share in zip(self.hosts, shares, strict=True):
                owned[host] += share
            host_shares = [owned[host] for host in self.hosts]
        total = 0.0
        for level in self.levels:
            distinct = set(zip(level, shares, host_shares, strict=True))
            total += max(line.at(*owned) for lines, *owned in distinct for line in lines)
        return max(self.least, total)


@dataclass(frozen=True, slots=True)
class CollectiveCosts:
    """`R(p)` and `G(p)`: the reduce-scatter and the all-gather of the whole model."""

    reduce_scatter: CollectiveCost
    all_gather: CollectiveCost

    @classmethod
    @lru_cache(maxsize=8)  # a search asks for every stage and number of persistent units
    def of(cls, network: NetworkProfile, buffers: int = 1) -> CollectiveCosts:
        """The costs of a measured or estimated network.

        Args:
            network: its rates, its latencies if they were measured.
            buffers: of the model that was measured; latencies are a part of its seconds.
        """
        reduce_levels, gather_levels = _levels_of_both(network)
        reduce = _scaled(network.reduce_scatter_seconds, reduce_levels, network.hosts)
        gather = _scaled(network.all_gather_seconds, gather_levels, network.hosts)
        if network.collective_latency_seconds:
            reduce_each, gather_each = network.collective_latency_seconds
            reduce = _with_latency(reduce, buffers, reduce_each)
            gather = _with_latency(gather, buffers, gather_each)
        return cls(reduce_scatter=reduce, all_gather=gather)


def rate_seconds(network: NetworkProfile) -> tuple[float, float]:
    """A reduce-scatter and an all-gather under even shares by the rates alone. Only ratios matter.

    Both are 0 for one rank, and if the rates were not measured.
    """
    ranks = len(network.send_seconds_per_byte)
    reduced, gathered = (
        CollectiveCost(0.0, levels, network.hosts).seconds((1.0 / ranks,) * ranks)
        for levels in _levels_of_both(network)
    )
    return reduced, gathered


def _levels_of_both(network: NetworkProfile) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """The lines of a reduce-scatter and of an all-gather, which sends what the other receives."""
    sending, receiving = network.send_seconds_per_byte, network.receive_seconds_per_byte
    return (
        _levels(network, leaving=sending, arriving=receiving),
        _levels(network, leaving=receiving, arriving=sending),
    )


def _with_latency(cost: CollectiveCost, buffers: int, latency: float) -> CollectiveCost:
    """The cost with the latency of a buffer, of so many that were measured."""
    n = len(cost.levels[0])
    whole = cost.seconds((1.0 / n,) * n)
    bandwidth = max(0.0, 1.0 - buffers * latency / whole) if whole else 1.0
    return replace(cost, latency=latency, bandwidth_part=bandwidth)


def _levels(
    network: NetworkProfile, leaving: Sequence[float], arriving: Sequence[float]
) -> tuple[Level, ...]:
    """The lines of a reduce-scatter; of an all-gather, with the rates exchanged.

    Args:
        leaving: by rank, rate of the link that carries everything but what the rank keeps.
        arriving: by rank, rate of the link that carries what it keeps once per other rank.
    """
    hosts = network.hosts
    rates = list(zip(leaving, arriving, strict=True))
    if not hosts:
        others = len(rates) - 1
        return (tuple((Line(out, -out), Line(0.0, others * into)) for out, into in rates),)
    shared = network.network_seconds_per_byte
    members = Counter(hosts)
    between = len(members) - 1
    network_level = tuple(
        (Line(out, 0.0, -out), Line(0.0, 0.0, between * into))
        for out, into in (zip(shared, shared, strict=True) if shared else rates)
    )
    if not shared:
        return (network_level,)
    links = (
        (members[host], max(0.0, out - slow), max(0.0, into - slow))
        for host, (out, into), slow in zip(hosts, rates, shared, strict=True)
    )
    return tuple(_within_host(*link) for link in links), network_level


def _within_host(ranks: int, leaving: float, arriving: float) -> tuple[Line, ...]:
    """A rank keeps its share and an equal part of what the other hosts own, which it relays."""
    kept = Line(1.0 / ranks, 1.0, -1.0 / ranks)
    sent = Line(1.0 - kept.constant, -kept.rank, -kept.host)
    return sent.times(leaving), kept.times((ranks - 1) * arriving)


def _scaled(measured: float, levels: tuple[Level, ...], hosts: tuple[int, ...]) -> CollectiveCost:
    """Scale the lines so that even shares take the measured seconds."""
    n = len(levels[0])
    even = CollectiveCost(0.0, levels, hosts).seconds((1.0 / n,) * n)
    scale = measured / even if n > 1 and even > 0.0 else 0.0
    least = 0.0 if scale else measured
    return CollectiveCost(least, tuple(level_times(level, scale) for level in levels), hosts)


def level_times(level: Level, factor: float) -> Level:
    """The level with `factor` times the seconds."""
    known = {lines: tuple(line.times(factor) for line in lines) for lines in set(level)}
    return tuple(map(known.__getitem__, level))
