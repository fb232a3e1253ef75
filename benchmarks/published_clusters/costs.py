"""Seconds of compute and of transfers: the same functions for every policy.

Compute follows `poplar.hardware.roofline`, transfers `poplar.values.host_traffic` with the
hierarchical transport: the ranks of a host first combine their data over its links, and the network
of a host carries them once. Both levels take their time one after the other, as in [Note: estimated
collectives] of `poplar.hardware.simulated_cluster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap

from poplar.hardware.roofline import LAYER_SECONDS, TRAFFIC
from poplar.hardware.simulated_cluster import LINK_EFFICIENCY
from poplar.values.host_traffic import Traffic, link_traffic, network_traffic
from published_clusters.cluster import Cluster
from published_clusters.layer import BYTES, Layer

CALL_SECONDS = 50e-6
"""Latency of a collective per level; assumed."""
GROUPED_EFFICIENCY = 0.63
"""Bandwidth of collectives as one call per rank ("grouped"), relative to that of padded ones. HAP's
master.py has profiles of 549.8 against 815.4 MB/s (all-gather) and 512.4 against 876.5 MB/s
(reduce-scatter): 0.67 and 0.58."""
BACKWARD = 2.0
"""Work of a backward relative to its forward."""
_LAUNCHES = LAYER_SECONDS / (1.0 + BACKWARD)
_UPDATE_BYTES = 7 * BYTES
"""AdamW per element: parameter and moments read and written, gradient read."""
_STATE_BYTES = 4 * BYTES
"""Parameter, gradient and moments."""
_HELD_BYTES = 1 << 30
"""CUDA context and libraries; assumed as in `poplar.hardware.roofline`."""

Transfer = tuple[float, ...]
"""Seconds by host and direction: leaving host 0, arriving at host 0, leaving host 1, ..."""


@dataclass(frozen=True)
class Costs:
    """Of one cluster."""

    cluster: Cluster

    def forward_seconds(self, rank: int, layer: Layer, samples: float, part: float = 1.0) -> float:
        """Of a layer's forward on one rank.

        Args:
            rank: which computes it.
            layer: the layer.
            samples: of the batch.
            part: of the layer's width.
        """
        if samples * part <= 0.0:
            return 0.0
        device = self.cluster.devices[rank]
        work = layer.flops / device.flops_per_s
        work += TRAFFIC / (1.0 + BACKWARD) * BYTES * layer.produced / device.bytes_per_s
        return _LAUNCHES * layer.launches + part * (
            samples * work + layer.nbytes / device.bytes_per_s
        )

    def pass_seconds(self, rank: int, layer: Layer, samples: float, part: float = 1.0) -> float:
        """Of forward and backward."""
        return (1.0 + BACKWARD) * self.forward_seconds(rank, layer, samples, part)

    def update_seconds(self, rank: int, parameters: float) -> float:
        """Of AdamW."""
        return _UPDATE_BYTES * parameters / self.cluster.devices[rank].bytes_per_s

    def missing_bytes(
        self, rank: int, state: float, activations: float, gathered: float = 0.0
    ) -> float:
        """Bytes by which a rank's memory is too small; negative if it is large enough.

        Args:
            rank: whose memory.
            state: elements with optimizer state on this rank.
            activations: elements that its forward stores.
            gathered: elements of parameters and gradients of others.
        """
        needed = _HELD_BYTES + _STATE_BYTES * state + BYTES * (activations + 2 * gathered)
        return needed - self.cluster.devices[rank].memory_gib * 2**30

    # Transfers.

    def reduce_scatter(self, nbytes: float, shares: Sequence[float]) -> Transfer:
        """Every rank has a whole buffer; rank `r` gets `shares[r]` of the sum."""
        by_host = self.cluster.by_host(tuple(nbytes * share for share in shares))
        within = link_traffic(by_host, hierarchical=True)
        between = network_traffic(by_host, hierarchical=True)
        busiest = [
            Traffic(max(one.leaving for one in ranks), max(one.arriving for one in ranks))
            for ranks in within
        ]
        return self._transfer(busiest, between)

    def all_gather(self, nbytes: float, shares: Sequence[float]) -> Transfer:
        """The same bytes as a reduce-scatter, in the opposite direction."""
        seconds = self.reduce_scatter(nbytes, shares)
        return tuple(seconds[lane ^ 1] for lane in range(len(seconds)))

    def all_reduce(self, nbytes: float) -> Transfer:
        """A reduce-scatter and an all-gather of even shares, which all hosts end together."""
        return _twice(_together(self.reduce_scatter(nbytes, self._even)))

    def padded(self, nbytes: float, shares: Sequence[float]) -> Transfer:
        """A reduce-scatter or all-gather in which every rank's part is as long as the longest."""
        padded = nbytes * self.cluster.world_size * max(shares)
        return _together(self.reduce_scatter(padded, self._even))

    def grouped(self, nbytes: float, shares: Sequence[float]) -> Transfer:
        """A reduce-scatter or all-gather as one call per rank, without padding."""
        exact = self.reduce_scatter(nbytes / GROUPED_EFFICIENCY, shares)
        calls = max(0, self.cluster.world_size - 1) * CALL_SECONDS
        return _together(tuple(seconds + calls for seconds in exact))

    def all_to_all(
        self, nbytes: float, before: Sequence[float], after: Sequence[float]
    ) -> Transfer:
        """Rank `r` has `before[r]` of a tensor; each rank `s` gets `after[s]` of every part.

        There is nothing that the ranks of a host could combine.
        """
        had = self.cluster.by_host(tuple(nbytes * share for share in before))
        gets = self.cluster.by_host(tuple(after))
        total = sum(map(sum, had))
        within, between = [], []
        for own, parts in zip(had, gets, strict=True):
            mine, kept = sum(own), sum(parts)
            between.append(Traffic(mine * (1.0 - kept), (total - mine) * kept))
            sent = max(a * (kept - b) for a, b in zip(own, parts, strict=True))
            got = max((mine - a) * b for a, b in zip(own, parts, strict=True))
            within.append(Traffic(sent, got))
        return _together(self._transfer(within, between))

    def redistribute(
        self, nbytes: float, before: Sequence[float], after: Sequence[float]
    ) -> Transfer:
        """Consecutive parts of a tensor move to the ranks that have them under other shares."""
        flows = _flows(before, after)
        host_of, hosts = self.cluster.host_of, len(self.cluster.hosts)
        leaving, arriving, within = [0.0] * hosts, [0.0] * hosts, [0.0] * hosts
        for source, target, part in flows:
            here, there = host_of[source], host_of[target]
            if here != there:
                leaving[here] += part * nbytes
                arriving[there] += part * nbytes
            elif source != target:
                within[here] += part * nbytes
        between = list(starmap(Traffic, zip(leaving, arriving, strict=True)))
        if not any(within) and not any(leaving):
            return (0.0,) * (2 * hosts)
        links = [Traffic(own, own) for own in within]
        return _together(self._transfer(links, between))

    @cached_property
    def _even(self) -> tuple[float, ...]:
        return (1.0 / self.cluster.world_size,) * self.cluster.world_size

    def _transfer(self, within: Sequence[Traffic], between: Sequence[Traffic]) -> Transfer:
        hosts = self.cluster.hosts
        seconds: list[float] = []
        for host, link, network in zip(hosts, within, between, strict=True):
            calls = ((host.ranks > 1) + (len(hosts) > 1)) * CALL_SECONDS
            for on_link, on_network in (
                (link.leaving, network.leaving),
                (link.arriving, network.arriving),
            ):
                moving = on_link / host.link_bytes_per_s + on_network / host.network_bytes_per_s
                seconds.append(moving / LINK_EFFICIENCY + calls)
        return tuple(seconds)


def seconds_of(transfer: Transfer) -> float:
    """Until all hosts have ended it in both directions."""
    return max(transfer)


def _together(transfer: Transfer) -> Transfer:
    return (max(transfer),) * len(transfer)


def _twice(transfer: Transfer) -> Transfer:
    return tuple(2.0 * seconds for seconds in transfer)


def _flows(before: Sequence[float], after: Sequence[float]) -> list[tuple[int, int, float]]:
    """Source, target and size of each part that consecutive shares have in common."""
    found, source, target = [], 0, 0
    left, wanted = before[0], after[0]
    while True:
        moved = min(left, wanted)
        if moved > 1e-12:
            found.append((source, target, moved))
        left, wanted = left - moved, wanted - moved
        if left <= 1e-12:
            source += 1
            if source == len(before):
                return found
            left = before[source]
        if wanted <= 1e-12:
            target += 1
            if target == len(after):
                return found
            wanted = after[target]
