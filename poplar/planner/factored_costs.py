"""Seconds in which ranks exchange the factors of a layer and multiply them.

    exchange = max over links of bytes / rate  +  latencies  +  what a rank multiplies more

The last one: without factors, a rank multiplies its own rows for the whole weight in its backward;
with them, all rows for what it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poplar.planner.collective_costs import CollectiveCosts
from poplar.planner.factored_layers import factored_traffic
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, LinearLayer

_COLLECTIVES = 3
"""Of an exchange: the numbers of rows, output gradients, and inputs."""
_EFFICIENCY = 0.5
"""Part of a device's peak FLOP/s that products of a few rows reach at least."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A factored layer under a plan."""

    layer: LinearLayer
    samples: tuple[float, ...]
    """By rank, of a reduction: the mean over those of a step."""


def exchanges_of(cluster: ClusterProfile, plan: Plan) -> tuple[Exchange, ...]:
    """The factored layers of a plan.

    Raises:
        ValueError: the profile does not have one of them.
    """
    known = {layer.name: layer for layer in cluster.model.linear_layers}
    unknown = sorted(set(plan.factored) - set(known))
    if unknown:
        raise ValueError(
            f"the plan factors layers {unknown}, which the profile does not have; it has "
            f"{', '.join(known) or 'no layers that can be factored: profile again'}"
        )
    reductions = max(map(len, plan.micro_batches)) if plan.synchronizes_every_pass else 1
    samples = tuple(sum(own) / reductions for own in plan.micro_batches)
    return tuple(Exchange(known[name], samples) for name in plan.factored)


def can_exchange(cluster: ClusterProfile, *, replicated: bool) -> bool:
    """Whether the time of an exchange is known, and the engine would run it.

    Args:
        cluster: with measured rates, and no hierarchical transport.
        replicated: every rank updates all parameters, so all must multiply with the same bits.
    """
    is_one_kind = len({device.name for device in cluster.devices}) == 1
    has_rates = CollectiveCosts.of(cluster.network).reduce_scatter.link_seconds is not None
    return has_rates and cluster.world_size > 1 and (is_one_kind or not replicated)


def seconds_of_exchange(
    cluster: ClusterProfile, exchange: Exchange, shares: Sequence[float], *, replicated: bool
) -> float:
    """Seconds of one reduction of the layer as factors.

    Args:
        cluster: see `can_exchange`; without rates, bytes take no time.
        exchange: the layer and the samples of each rank.
        shares: fraction of the layer that each rank owns.
        replicated: every rank updates all parameters.
    """
    layer, model = exchange.layer, cluster.model
    costs = CollectiveCosts.of(cluster.network)
    rows = [layer.rows_per_sample * samples for samples in exchange.samples]
    traffic = factored_traffic(
        layer.outputs, layer.inputs, rows, shares, replicated=replicated, itemsize=1
    )
    links = costs.reduce_scatter.link_seconds or [(0.0, 0.0)] * len(rows)
    sending = max(
        max(moved.leaving * out, moved.arriving * into)
        for moved, (out, into) in zip(traffic, links, strict=True)
    )
    owned = [1.0] * len(shares) if replicated else shares
    multiplying = 0.0
    for device, own_rows, part in zip(cluster.devices, rows, owned, strict=True):
        more = 2.0 * layer.numel * (sum(rows) * part - own_rows)
        if device.peak_flops is not None and more > 0.0:
            multiplying = max(multiplying, more / (_EFFICIENCY * device.peak_flops))
    latency = _COLLECTIVES * costs.all_gather.latency
    return sending / model.numel + latency + multiplying
