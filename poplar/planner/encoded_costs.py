"""What encoding changes in a collective: fewer bytes, and the seconds of encoding and decoding.

With `ratio` the bytes of an encoded element over those that were measured,

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
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from poplar.planner.collective_costs import (
    CollectiveCost,
    CollectiveCosts,
    Level,
    Line,
    level_times,
)
from poplar.values.communication import BITS, Communication, Precision, encoded_bytes
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS, STRATEGIES
from poplar.values.profile import ClusterProfile, NetworkProfile

SHARED_MEMORY = "shared_memory"
"""The transport in which fewer bytes save nothing."""
_UNKNOWN = (0.0,) * len(BITS)


class _Codec(NamedTuple):
    """Seconds per element of a device, by precision."""

    encode: tuple[float, ...]
    decode: tuple[float, ...]


def precisions_at(communication: Communication, stage: int) -> tuple[Precision, Precision]:
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
    reduced, gathered = precisions_at(cluster.communication, stage)
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
    return known and cluster.world_size > 1 and cluster.network.transport != SHARED_MEMORY


def least_ratios(cluster: ClusterProfile) -> tuple[float, float]:
    """The part of the measured seconds that a reduction and an all-gather take at any stage, at
    least.
    """
    measured = cluster.model.wire_bytes, cluster.model.param_bytes
    by_stage = [
        tuple(
            min(1.0, _ratio(cluster.network, precision, exact))
            for precision, exact in zip(
                precisions_at(cluster.communication, stage), measured, strict=True
            )
        )
        for stage in range(len(STRATEGIES))
    ]
    reduced, gathered = map(min, zip(*by_stage, strict=True))
    return reduced, gathered


def _ratio(network: NetworkProfile, precision: Precision, measured_bytes: float) -> float:
    if precision == "exact" or network.transport == SHARED_MEMORY or not measured_bytes:
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
    even = carrying.seconds((1.0 / ranks,) * ranks)
    factor = ratio + (1.0 - ratio) * min(1.0, unchanged / even) if even else 1.0
    fewer = (level_times(level, factor) for level in carrying.levels)
    return replace(cost, least=0.0, levels=(*levels[:exact_levels], *fewer, codec))
