"""The cost of a collective over the whole model under any shares, exact or encoded.

The direct algorithm (all-to-all, then a local sum) is bound by the busiest link. Profiles measure
it at even shares; under other shares its time follows from the ratios of the ranks' rates:

    reduce-scatter: rank r sends (1 - p[r]) and receives (n - 1) p[r] of the model
    all-gather:     rank r sends (n - 1) p[r] and receives (1 - p[r])

The hierarchical transport moves data within each host, and then between hosts: two levels, one
after the other. `poplar.values.host_traffic` has what each moves. All of these are lines in a
rank's share and in the share of its host, so a linear program minimizes their maximum.

[Note: encoded collectives]
Encoding sends fewer bytes, and takes seconds to encode and to decode. With `ratio` the bytes of an
encoded element over those that were measured,

    encoded = unchanged + ratio * (measured - unchanged) + the codec on the slowest rank

Latencies are unchanged and, if the ranks of a host add exactly before they send, what a reduction
takes within hosts. In shared memory no byte is saved. Of a model of `N` elements on `n` ranks, or
on `h` hosts with `m` ranks on its own one, a rank with the share `p` encodes and decodes

                               encoded                              decoded
    reduction                  N                                    n N p
    reduction over hosts       N (p + (1 - its host's share) / m)   h N p
    all-gather                 N p                                  N

A reduction that was measured has packed and added exactly; only what takes longer is added. Frozen
parameters, which stage 3 unshards too, are sent as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from poplar.values.communication import BITS, Communication, Precision, encoded_bytes
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS, STRATEGIES
from poplar.values.profile import ClusterProfile, NetworkProfile

_SHARED_MEMORY = "shared_memory"
"""The transport in which fewer bytes save nothing."""
_UNKNOWN = (0.0,) * len(BITS)


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

    @property
    def even_seconds(self) -> float:
        """Seconds under equal shares of all ranks."""
        ranks = len(self.levels[0])
        return self.seconds((1.0 / ranks,) * ranks)

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
    reduced, gathered = (
        CollectiveCost(0.0, levels, network.hosts) for levels in _levels_of_both(network)
    )
    return reduced.even_seconds, gathered.even_seconds


def _levels_of_both(network: NetworkProfile) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """The lines of a reduce-scatter and of an all-gather, which sends what the other receives."""
    sending, receiving = network.send_seconds_per_byte, network.receive_seconds_per_byte
    return (
        _levels(network, leaving=sending, arriving=receiving),
        _levels(network, leaving=receiving, arriving=sending),
    )


def _with_latency(cost: CollectiveCost, buffers: int, latency: float) -> CollectiveCost:
    """The cost with the latency of a buffer, of so many that were measured."""
    whole = cost.even_seconds
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
    even = CollectiveCost(0.0, levels, hosts).even_seconds
    scale = measured / even if len(levels[0]) > 1 and even > 0.0 else 0.0
    least = 0.0 if scale else measured
    return CollectiveCost(least, tuple(_level_times(level, scale) for level in levels), hosts)


def _level_times(level: Level, factor: float) -> Level:
    """The level with `factor` times the seconds."""
    known = {lines: tuple(line.times(factor) for line in lines) for lines in set(level)}
    return tuple(map(known.__getitem__, level))


class _Codec(NamedTuple):
    """Seconds per element of a device, by precision."""

    encode: tuple[float, ...]
    decode: tuple[float, ...]


def _precisions_at(communication: Communication, stage: int) -> tuple[Precision, Precision]:
    """With which precision a stage reduces, and gathers."""
    sent = communication.at(stage)
    return sent.gradients, sent.gradients if stage == 0 else sent.parameters


def with_encoding(
    exact: CollectiveCosts, cluster: ClusterProfile, stage: int, buffers: int
) -> CollectiveCosts:
    """The costs of a stage's collectives under the cluster's communication.

    Args:
        cluster: devices without seconds of the codec take none.
        buffers: in which the collectives of the whole model were measured.
    """
    reduced, gathered = _precisions_at(cluster.communication, stage)
    if cluster.world_size == 1 or reduced == gathered == "exact":
        return exact
    model, network = cluster.model, cluster.network
    codecs = tuple(
        _Codec(device.encode_seconds or _UNKNOWN, device.decode_seconds or _UNKNOWN)
        for device in cluster.devices
    )
    if reduced != "exact":
        sent = reduced, _ratio(network, reduced, model.wire_bytes), model.numel
        exact = replace(exact, reduce_scatter=_reduction(exact, network, codecs, buffers, *sent))
    if gathered != "exact":
        trained = 1.0
        if stage == FIRST_STAGE_SHARDING_PARAMETERS and model.param_bytes:
            trained = model.param_bytes * model.numel / sum(model.parameter_bytes)
        ratio = 1.0 - trained * (1.0 - _ratio(network, gathered, model.param_bytes))
        sent = gathered, ratio, round(trained * model.numel)
        exact = replace(exact, all_gather=_all_gather(exact, codecs, buffers, *sent))
    return exact


def without_codec(cluster: ClusterProfile) -> ClusterProfile:
    """The cluster if encoding and decoding took no time."""
    return cluster.with_devices(
        lambda device: replace(device, encode_seconds=(), decode_seconds=())
    )


def may_gain(cluster: ClusterProfile) -> bool:
    """Whether encoding can make a step faster, as far as the seconds of the codec are known."""
    known = all(device.encode_seconds for device in cluster.devices)
    return known and cluster.world_size > 1 and cluster.network.transport != _SHARED_MEMORY


def least_ratios(cluster: ClusterProfile) -> tuple[float, float]:
    """The part of the measured seconds that a reduction and an all-gather take at any stage, at
    least.
    """
    measured = cluster.model.wire_bytes, cluster.model.param_bytes
    by_stage = [
        tuple(
            min(1.0, _ratio(cluster.network, precision, exact))
            for precision, exact in zip(
                _precisions_at(cluster.communication, stage), measured, strict=True
            )
        )
        for stage in range(len(STRATEGIES))
    ]
    reduced, gathered = map(min, zip(*by_stage, strict=True))
    return reduced, gathered


def _ratio(network: NetworkProfile, precision: Precision, measured_bytes: float) -> float:
    if precision == "exact" or network.transport == _SHARED_MEMORY or not measured_bytes:
        return 1.0
    return encoded_bytes(precision) / measured_bytes


@lru_cache(maxsize=8)  # as for the exact costs
def _reduction(
    exact: CollectiveCosts,
    network: NetworkProfile,
    codecs: tuple[_Codec, ...],
    buffers: int,
    precision: Precision,
    ratio: float,
    numel: int,
) -> CollectiveCost:
    cost, hosts, at = exact.reduce_scatter, network.hosts, list(BITS).index(precision)
    members = Counter(hosts)

    def codec_line(rank: int) -> Line:
        encode, decode = codecs[rank]
        added = numel * max(0.0, decode[at] - ratio * decode[0])
        if not hosts:
            encoded = numel * max(0.0, encode[at] - ratio * encode[0])
            return Line(encoded, len(codecs) * added)
        encoded, kept = numel * encode[at], 1.0 / members[hosts[rank]]
        return Line(encoded * kept, encoded + len(members) * added, -encoded * kept)

    inner = len(cost.levels) - 1  # levels within hosts
    within = network.within_host_seconds[0] if hosts and network.within_host_seconds else 0.0
    unchanged = buffers * cost.latency + within
    level = tuple((codec_line(rank),) for rank in range(len(codecs)))
    return _with_fewer_bytes(cost, ratio, inner, unchanged, level)


@lru_cache(maxsize=8)
def _all_gather(
    exact: CollectiveCosts,
    codecs: tuple[_Codec, ...],
    buffers: int,
    precision: Precision,
    ratio: float,
    numel: int,
) -> CollectiveCost:
    cost, at = exact.all_gather, list(BITS).index(precision)
    level = tuple((Line(numel * own.decode[at], numel * own.encode[at]),) for own in codecs)
    return _with_fewer_bytes(cost, ratio, 0, buffers * cost.latency, level)


def _with_fewer_bytes(
    cost: CollectiveCost, ratio: float, exact_levels: int, unchanged: float, codec: Level
) -> CollectiveCost:
    """A collective of encoded elements.

    Args:
        ratio: of the bytes.
        exact_levels: so many of the first levels carry exact elements.
        unchanged: seconds of the other levels under even shares that do not depend on bytes.
        codec: the lines of encoding and decoding.
    """
    levels, ranks = cost.levels, len(codec)
    if cost.least:  # the rates are unknown
        levels, exact_levels = (((Line(cost.least, 0.0),),) * ranks,), 0
    carrying = replace(cost, least=0.0, levels=levels[exact_levels:])
    even = carrying.even_seconds
    factor = ratio + (1.0 - ratio) * min(1.0, unchanged / even) if even else 1.0
    fewer = (_level_times(level, factor) for level in carrying.levels)
    return replace(cost, least=0.0, levels=(*levels[:exact_levels], *fewer, codec))
