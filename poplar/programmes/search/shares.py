"""The best shares for the state of the parameters that a programme replicates.

Gradients of these parameters are reduced, and new values gathered, as at ZeRO stage 1. So this is
the linear programme of plans (`shard_allocation`), on a cluster that has only the replicated part
of the model: each rank's optimizer also updates its sharded parameters, whatever the shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from poplar.planner.cost_model import StageCosts
from poplar.planner.shard_allocation import ShareProblem
from poplar.programmes.search.step_model import STAGE, StepModel
from poplar.programmes.search.step_terms import StepTerms
from poplar.values.profile import ClusterProfile, DeviceProfile


def best_shares(model: StepModel, terms: StepTerms, ratios: tuple[int, ...]) -> tuple[float, ...]:
    """The ranks' shares with the fewest predicted seconds; those of the model if none fit.

    Args:
        model: of the step.
        terms: of the programme.
        ratios: of the programme.
    """
    costs = StageCosts(_replicated_part(model, terms, ratios), STAGE)
    problem = ShareProblem(costs, list(_most_shares(model, terms, ratios)))
    if not terms.replicated or not problem.is_feasible:
        return model.shares
    compute = model.compute_seconds(terms, ratios)
    return problem.cheapest({(model.synchronization(compute), True): 1}).shares


def _most_shares(model: StepModel, terms: StepTerms, ratios: tuple[int, ...]) -> Iterator[float]:
    """The largest share for which each rank's memory suffices: bytes are convex in the share, so
    they are at most those on the line between no share and all.
    """
    ranks = len(ratios)
    without, with_all = (model.with_shares((share,) * ranks) for share in (0.0, 1.0))
    for rank in range(ranks):
        least = without.memory_bytes(terms, ratios, rank)
        more = with_all.memory_bytes(terms, ratios, rank) - least
        room = model.memory_limit(rank) - least
        yield min(1.0, max(0.0, room / more)) if more > 0.0 else 1.0


def _replicated_part(model: StepModel, terms: StepTerms, ratios: tuple[int, ...]) -> ClusterProfile:
    """The cluster with the replicated part of the model."""
    cluster, part = model.cluster, terms.replicated_fraction
    network = cluster.network
    sharded = model.sharded(terms, ratios)
    return replace(
        cluster,
        devices=tuple(map(_updating, cluster.devices, [part] * len(ratios), sharded)),
        network=replace(
            network,
            reduce_scatter_seconds=part * network.reduce_scatter_seconds,
            all_gather_seconds=part * network.all_gather_seconds,
        ).with_residuals(STAGE, synchronization=0.0, step=0.0),
    )


def _updating(device: DeviceProfile, part: float, always: float) -> DeviceProfile:
    """The device if its optimizer always updates one part of the model, and another by shares."""
    least, whole = map(device.optimizer_step_seconds, (always, always + part))
    return replace(device, optimizer_latency_seconds=least, optimizer_seconds=whole)
