"""Seconds of a collective on activations, by the measured rates of the ranks' links.

The direct algorithm: every rank sends each other rank its part at once, so the busiest link takes
the time. Rates are those of the measured collectives on the model (`collective_costs`). Behind a
hierarchical transport, or where rates were not measured, all ranks have the rate of the collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poplar.planner.collective_costs import CollectiveCost, CollectiveCosts
from poplar.planner.cost_model import StageCosts

UNMEASURED_LATENCY_SECONDS = 1e-4
"""Latency in profiles without latencies: that of a small gloo all-to-all on one host."""

Parts = Sequence[float]
"""The part of a tensor that each rank has."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of the ranks in one collective."""

    send: tuple[float, ...]
    """Seconds per byte, by rank."""
    receive: tuple[float, ...]
    latency: float

    def reversed(self) -> Links:
        """The links with the rates of sending and receiving exchanged."""
        return Links(self.receive, self.send, self.latency)

    def busiest(self, sent: Parts, received: Parts) -> float:
        """Seconds per byte of the tensor, without latency."""
        out = max(part * rate for part, rate in zip(sent, self.send, strict=True))
        into = max(part * rate for part, rate in zip(received, self.receive, strict=True))
        return max(out, into)


@dataclass(frozen=True, slots=True)
class ActivationLinks:
    """The links in reductions and in other collectives."""

    reducing: Links
    """Links of reductions, with packing and summation."""
    moving: Links

    @classmethod
    def of(cls, costs: StageCosts) -> ActivationLinks:
        """The links of a measured cluster."""
        model, network = costs.cluster.model, costs.cluster.network
        latencies = network.collective_latency_seconds or (UNMEASURED_LATENCY_SECONDS,) * 4
        both: CollectiveCosts = costs.collectives
        numel = float(model.numel)
        return cls(
            _links(both.reduce_scatter, numel * (model.wire_bytes or 4.0), latencies[0]),
            # In lines of an all-gather, the first rate is that of receiving.
            _links(both.all_gather, numel * (model.param_bytes or 4.0), latencies[1]).reversed(),
        )

    def all_gather(self, parts: Parts) -> float:
        """Seconds per byte of the whole tensor, of which rank `r` has `parts[r]`."""
        others = len(parts) - 1
        return self.moving.busiest([others * part for part in parts], [1.0 - p for p in parts])

    def reduce_scatter(self, parts: Parts) -> float:
        """Seconds per byte of the whole tensor, of which rank `r` gets `parts[r]`."""
        others = len(parts) - 1
        return self.reducing.busiest([1.0 - p for p in parts], [others * part for part in parts])

    def all_to_all(self, before: Parts, after: Parts) -> float:
        """Seconds per byte of the whole tensor, cut along one dimension and then along another."""
        pairs = list(zip(before, after, strict=True))
        sent = [a * (1.0 - b) for a, b in pairs]
        received = [b * (1.0 - a) for a, b in pairs]
        return self.moving.busiest(sent, received)


def _links(cost: CollectiveCost, nbytes: float, latency: float) -> Links:
    ranks = len(cost.levels[0])
    if ranks == 1:
        return Links((0.0,), (0.0,), 0.0)
    rates = cost.link_seconds
    if rates is None:
        whole = cost.seconds((1.0 / ranks,) * ranks) * ranks / (ranks - 1)
        rates = [(whole, whole)] * ranks
    scale = cost.bandwidth_part / nbytes
    return Links(
        tuple(scale * first for first, _ in rates),
        tuple(scale * second for _, second in rates),
        latency,
    )
