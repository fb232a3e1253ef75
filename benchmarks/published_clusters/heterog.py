"""Our reconstruction of HeteroG's policy (CoNEXT 2020). It is not the authors' code.

For each group of operators: run it on one device, or replicate it on all devices with even or
proportional batches, its gradients to a parameter server or all-reduced. For the whole model: which
of the transfers that wait goes first. The authors train a graph neural network to choose. Here the
best decision for all groups is improved one group after another, on the simulator, until no single
change helps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from published_clusters.costs import Costs
from published_clusters.data_parallel import batch_shares, speeds
from published_clusters.decision import Decision, Decisions
from published_clusters.layer import Layer, groups
from published_clusters.simulation import simulate

_GAIN = 1e-6
"""Part of a step by which a change must help."""


def heterog(
    costs: Costs, layers: tuple[Layer, ...], global_batch: int, sweeps: int = 3
) -> Decisions:
    """Decisions that no change of a single group makes faster.

    Args:
        costs: of the cluster.
        layers: of the model; those of one block are one group.
        global_batch: samples of all ranks.
        sweeps: over all groups, at most.
    """
    parts = groups(layers)
    servers = placed_servers(costs, parts)
    best, least = None, math.inf
    for candidate in _uniform(costs, parts, global_batch, servers):
        seconds = _seconds(costs, candidate)
        if seconds < least:
            best, least = candidate, seconds
    assert best is not None, "data parallelism fits nowhere"
    for _ in range(sweeps):
        before = least
        for index, _ in enumerate(parts):
            for option in options(costs, global_batch, servers[index]):
                changed = list(best.decisions)
                changed[index] = option
                candidate = dataclasses.replace(best, decisions=tuple(changed))
                seconds = _seconds(costs, candidate)
                if seconds < (1.0 - _GAIN) * least:
                    best, least = candidate, seconds
        if least >= before:
            break
    return best


def even_servers(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> Decisions:
    """Data parallelism with even batches, in which each gradient goes to a parameter server."""
    parts, ranks = groups(layers), costs.cluster.world_size
    batch = batch_shares(global_batch, [1.0] * ranks)
    decisions = tuple(
        Decision(batch=batch, parameters="server", shares=_only(server, ranks))
        for server in placed_servers(costs, parts)
    )
    return Decisions(layers=parts, decisions=decisions, global_batch=global_batch)


def options(costs: Costs, global_batch: int, server: int) -> Iterator[Decision]:
    """The decisions to choose from for a group whose parameter server is this rank."""
    ranks = costs.cluster.world_size
    for weights in ([1.0] * ranks, speeds(costs)):
        batch = batch_shares(global_batch, weights)
        yield Decision(batch=batch)
        yield Decision(batch=batch, parameters="server", shares=_only(server, ranks))
    for host in range(len(costs.cluster.hosts)):  # one of its equal devices
        rank = costs.cluster.host_of.index(host)
        alone = _only(rank, ranks)
        yield Decision(batch=alone, parameters="server", shares=alone)


def placed_servers(costs: Costs, layers: tuple[Layer, ...]) -> list[int]:
    """By group, its parameter server: large groups first, each on the least loaded network."""
    cluster = costs.cluster
    load = [0.0] * len(cluster.hosts)
    next_rank = [0] * len(cluster.hosts)
    servers = [0] * len(layers)
    for index in sorted(range(len(layers)), key=lambda i: -layers[i].parameters):
        after = [
            (own + layers[index].nbytes) / host.network_bytes_per_s
            for own, host in zip(load, cluster.hosts, strict=True)
        ]
        host = after.index(min(after))
        load[host] += layers[index].nbytes
        first = cluster.host_of.index(host)
        servers[index] = first + next_rank[host] % cluster.hosts[host].ranks
        next_rank[host] += 1
    return servers


def _uniform(
    costs: Costs, layers: tuple[Layer, ...], global_batch: int, servers: list[int]
) -> Iterator[Decisions]:
    """The same decision for all groups, in both orders of transfers."""
    by_group = [list(options(costs, global_batch, server)) for server in servers]
    for decisions in zip(*by_group, strict=True):
        for largest_first in (False, True):
            yield Decisions(
                layers=layers,
                decisions=decisions,
                global_batch=global_batch,
                largest_first=largest_first,
            )


def _seconds(costs: Costs, decisions: Decisions) -> float:
    """Of a step; of decisions that do not fit in memory, more the more bytes are missing."""
    missing = decisions.missing_bytes(costs)
    if missing > 0.0:
        return 1e6 + missing
    return simulate(costs.cluster, decisions.step(costs))


def _only(rank: int, ranks: int) -> tuple[float, ...]:
    return tuple(float(other == rank) for other in range(ranks))
