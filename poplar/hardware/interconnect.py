"""Estimated collectives of a described cluster: from link bandwidths to a `NetworkProfile`.

The transport is the hierarchical one: the ranks of a host reduce first, so each host sends one copy
of the gradients. With `M` bytes, `g` ranks on a host and `n` ranks on `H` hosts,

    within a host     M (g - 1) / g, by each rank's link
    between hosts     leaving M (1 - g / n), arriving (H - 1) M g / n, by each host's network

and the busiest host counts. `collective_costs` models uneven shares with each rank's links in
series, which is not tested for extreme shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poplar.profile import ModelProfile, NetworkProfile

LINK_EFFICIENCY = 0.75
"""Fraction of the specified bandwidth that collectives reach; assumed."""
_UNIT_SECONDS = 50e-6
"""Launch and latency of one unit's collective, per level; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLinks:
    """The links of one host, as specified."""

    ranks: int
    link_bytes_per_second: float
    """Between a rank and the other ranks of the host, each way."""
    network_bytes_per_second: float
    """Between the host and other hosts, each way; unused with one host."""


def network_profile(
    hosts: Sequence[HostLinks], model: ModelProfile, *, faster: float = 1.0
) -> NetworkProfile:
    """The collectives of a model; `faster` scales the bandwidth."""
    efficiency = LINK_EFFICIENCY * faster
    rates = tuple(
        _seconds_per_byte(host, len(hosts)) / efficiency
        for host in hosts
        for _ in range(host.ranks)
    )
    levels = 1 + (len(hosts) > 1)
    latency = levels * _UNIT_SECONDS * len(model.unit_numels) if len(rates) > 1 else 0.0
    return NetworkProfile(
        reduce_scatter_seconds=_seconds(hosts, model.wire_bytes * model.numel) / efficiency
        + latency,
        all_gather_seconds=_seconds(hosts, model.param_bytes * model.numel) / efficiency + latency,
        send_seconds_per_byte=rates,
        receive_seconds_per_byte=rates,
    )


def _seconds(hosts: Sequence[HostLinks], size: float) -> float:
    within = max(
        size * (host.ranks - 1) / host.ranks / host.link_bytes_per_second for host in hosts
    )
    if len(hosts) == 1:
        return within
    ranks = sum(host.ranks for host in hosts)
    between = max(
        size
        * max(1 - host.ranks / ranks, (len(hosts) - 1) * host.ranks / ranks)
        / host.network_bytes_per_second
        for host in hosts
    )
    return within + between


def _seconds_per_byte(host: HostLinks, hosts: int) -> float:
    within = 1.0 / host.link_bytes_per_second if host.ranks > 1 or hosts == 1 else 0.0
    return within + (1.0 / host.network_bytes_per_second if hosts > 1 else 0.0)
