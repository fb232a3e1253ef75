"""Data parallelism: even batches, and batches in proportion to FLOP/s."""

from __future__ import annotations

from collections.abc import Sequence

from poplar import _core
from published_clusters.costs import Costs
from published_clusters.decision import Decision, Decisions
from published_clusters.layer import Layer, groups


def data_parallel(
    layers: tuple[Layer, ...], global_batch: int, weights: Sequence[float]
) -> Decisions:
    """Whole samples in proportion to weights; gradients are all-reduced, one call per group."""
    decision = Decision(batch=batch_shares(global_batch, weights))
    units = groups(layers)
    return Decisions(layers=units, decisions=(decision,) * len(units), global_batch=global_batch)


def even(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> Decisions:
    """DP-EV."""
    return data_parallel(layers, global_batch, [1.0] * costs.cluster.world_size)


def by_flops(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> Decisions:
    """DP-CP."""
    return data_parallel(layers, global_batch, speeds(costs))


def speeds(costs: Costs) -> list[float]:
    """FLOP/s, by rank."""
    return [device.flops_per_s for device in costs.cluster.devices]


def batch_shares(global_batch: int, weights: Sequence[float]) -> tuple[float, ...]:
    """Parts of the batch that are whole samples."""
    samples = _core.apportion(global_batch, list(weights))
    return tuple(count / global_batch for count in samples)
