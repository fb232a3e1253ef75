"""Seconds in which ranks exchange the factors of a linear layer, and multiply them.

    exchange = max over links of bytes / rate  +  latencies  +  what a rank multiplies more

The last one: without factors, a rank multiplies its own rows for the whole weight in its backward;
with them, all rows for what it owns. A layer has `outputs` times `inputs` weights; with `N` rows of
all `R` ranks, and even shares and rows, all ranks together send

                                reduced                          as factors
    sharded                     (R - 1) outputs inputs           (R - 1) N (inputs + outputs / R)
    every rank updates all      2 (R - 1) outputs inputs         (R - 1) N (inputs + outputs)

elements: an owner gets the whole inputs, and the gradients of the outputs that it owns. Inputs are
sent in the compute dtype if it is narrower than that of reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poplar.planner.collective_costs import CollectiveCosts
from poplar.values.host_traffic import Traffic
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile, LinearLayer

_COLLECTIVES = 2
"""Of an exchange: the numbers of rows, and the rows."""
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


def seconds_of_exchange(
    cluster: ClusterProfile, exchange: Exchange, shares: Sequence[float], *, replicated: bool
) -> float:
    """Seconds of one reduction of the layer as factors.

    Args:
        cluster: without measured rates, bytes take no time.
        replicated: every rank updates all parameters.
    """
    layer, model = exchange.layer, cluster.model
    costs = CollectiveCosts.of(cluster.network)
    rows = [layer.rows_per_sample * samples for samples in exchange.samples]
    owned = [1.0] * len(shares) if replicated else shares
    links = costs.reduce_scatter.link_seconds or [(0.0, 0.0)] * len(rows)
    input_size = min(1.0, model.param_bytes / model.wire_bytes) if model.wire_bytes else 1.0
    traffic = factored_traffic(layer, rows, owned, input_size)
    sending = max(
        max(moved.leaving * out, moved.arriving * into)
        for moved, (out, into) in zip(traffic, links, strict=True)
    )
    multiplying = 0.0
    for device, own_rows, part in zip(cluster.devices, rows, owned, strict=True):
        more = 2.0 * layer.numel * (sum(rows) * part - own_rows)
        if device.peak_flops is not None and more > 0.0:
            multiplying = max(multiplying, more / (_EFFICIENCY * device.peak_flops))
    latency = _COLLECTIVES * costs.all_gather.latency
    return sending / model.numel + latency + multiplying


def factored_traffic(
    layer: LinearLayer, rows: Sequence[float], owned: Sequence[float], input_size: float = 1.0
) -> list[Traffic]:
    """What each rank sends and receives in one reduction of a layer as factors.

    The unit is an element of a gradient. Where a slice begins or ends inside a row of the weight,
    up to 2 more columns are sent.

    Args:
        rows: of each rank.
        input_size: bytes of an element of the inputs over those of a gradient.
    """
    inputs = layer.inputs * input_size
    needed = [inputs + layer.outputs * part if part > 0 else 0.0 for part in owned]
    all_rows, all_needed = sum(rows), sum(needed)
    return [
        Traffic(own_rows * (all_needed - own_needs), (all_rows - own_rows) * own_needs)
        for own_rows, own_needs in zip(rows, needed, strict=True)
    ]
