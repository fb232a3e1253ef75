"""Poplar: the programmes that `poplar.programmes.search` finds, on the costs of all policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from poplar import _core
from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph, Node, TensorType
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import pattern_of
from poplar.programmes.rules.strategy import strategy_of
from poplar.programmes.search.composition import data_parallel
from poplar.programmes.search.costs import ClusterCosts, Links, RankSeconds
from poplar.programmes.search.search import fastest_in
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_terms import StepTerms, divided_units, parts_of
from published_clusters.costs import BACKWARD, Costs, Transfer, seconds_of
from published_clusters.data_parallel import speeds
from published_clusters.layer import Layer
from published_clusters.step import Part, Step

LIMIT = 20_000
"""States of the search, about."""
EXPOSED = (1.0, 0.5, 0.0)
"""Parts of the gradients' seconds that do not overlap, in one search each."""
_PROBE_BYTES = 1e8


def found_programmes(
    graph: Graph, costs: Costs, global_batch: int, limit: int = LIMIT
) -> Iterator[Programme]:
    """The fastest programmes if all, half or none of the gradients' seconds are exposed.

    How much of the reductions overlaps with the backward depends on the programme.
    """
    space = SearchSpace.of(graph, restricted=True)
    costs_of_search = search_costs(costs, graph, global_batch)
    found: list[Programme] = []
    for exposed in EXPOSED:
        priced = replace(costs_of_search, element_seconds=exposed * costs_of_search.element_seconds)
        one = fastest_in(space, priced, width=limit // len(space.nodes))
        if one is not None and one not in found:
            found.append(one)
            yield one


def search_costs(costs: Costs, graph: Graph, global_batch: int) -> ClusterCosts:
    """The costs as the search takes them: one rate for all collectives, that of an all-reduce.

    Gradients are exposed.
    """
    ranks = costs.cluster.world_size
    seconds = seconds_of(costs.all_reduce(2 * _PROBE_BYTES)) - seconds_of(
        costs.all_reduce(_PROBE_BYTES)
    )
    rate = seconds / (2.0 * (1.0 - 1.0 / ranks) * _PROBE_BYTES)
    latency = seconds_of(costs.all_reduce(0.0)) / 2.0
    links = Links((rate,) * ranks, (rate,) * ranks, latency)
    ratios = tuple(_core.apportion(global_batch, speeds(costs)))
    terms = StepTerms.of(graph, data_parallel(graph, ratios))
    patterns = (pattern_of(graph, o) for o in graph.nodes.values() if o.operator not in LEAVES)
    flops = (1.0 + BACKWARD) * sum(pattern.flops for pattern in patterns)
    return ClusterCosts(
        ratios=ratios,
        compute=RankSeconds((0.0,) * ranks, tuple(flops / speed for speed in speeds(costs))),
        work=sum(terms.work.values()),
        reducing=links,
        moving=links,
        element_seconds=2.0 * (1.0 - 1.0 / ranks) * 4.0 * rate,
    )


def programme_step(
    costs: Costs,
    graph: Graph,
    programme: Programme,
    layers: tuple[Layer, ...],
    global_batch: int,
) -> Step:
    """The programme as a step of the simulation that all policies share.

    The compute of all operators together is that of the layers; an operator has its part of their
    FLOPs.
    """
    patterns = {n: pattern_of(graph, o) for n, o in graph.nodes.items() if o.operator not in LEAVES}
    total = sum(pattern.flops for pattern in patterns.values())
    ranks = range(costs.cluster.world_size)
    whole = [sum(costs.forward_seconds(r, one, global_batch) for one in layers) for r in ranks]
    moves: dict[str, list[Transfer]] = {}
    for moved in programme.collectives(graph):
        kind = graph.nodes[moved.node].output
        if kind.is_floating:
            transfer = _transfer(costs, kind, moved.source, moved.target, programme.ratios)
            moves.setdefault(moved.node, []).append(transfer)
    read: set[str] = set()
    parts = []
    for name, pattern in patterns.items():
        strategy = strategy_of(pattern, programme.inputs[name], programme.placements[name])
        own = parts_of(divided_units(pattern, strategy), programme.ratios)
        forward = tuple(pattern.flops / total * own[rank] * whole[rank] for rank in ranks)
        new = [p for p in dict.fromkeys(graph.nodes[name].inputs) if p not in read]
        read.update(new)
        parameters = [graph.nodes[p] for p in new if graph.nodes[p].operator == PARAMETER]
        replicated = [
            node.output for node in parameters if programme.placements[node.name] is REPLICATED
        ]
        owned = [_owned(parameters, programme, rank) for rank in ranks]
        nbytes = float(sum(kind.nbytes for kind in replicated))
        parts.append(
            Part(
                forward=forward,
                backward=tuple(BACKWARD * seconds for seconds in forward),
                update=tuple(costs.update_seconds(rank, owned[rank]) for rank in ranks),
                after=tuple(moves.get(name, ())),
                gradient=costs.all_reduce(nbytes) if nbytes else None,
            )
        )
    return Step(parts=tuple(parts))


def missing_bytes(
    costs: Costs,
    graph: Graph,
    programme: Programme,
    layers: tuple[Layer, ...],
    global_batch: int,
) -> float:
    """Bytes by which the memory of a rank is too small, of the rank that lacks most.

    Activations are those of the layers, in proportion to the rank's FLOPs.
    """
    parameters = [node for node in graph.nodes.values() if node.operator == PARAMETER]
    produced = global_batch * sum(layer.produced for layer in layers)
    shares = [ratio / sum(programme.ratios) for ratio in programme.ratios]
    return max(
        costs.missing_bytes(rank, _owned(parameters, programme, rank), shares[rank] * produced)
        for rank in range(costs.cluster.world_size)
    )


def _owned(parameters: Sequence[Node], programme: Programme, rank: int) -> float:
    """Elements of parameters on a rank."""
    return sum(
        node.output.numel
        * _part(node.output, programme.placements[node.name], programme.ratios, rank)
        for node in parameters
    )


def _transfer(
    costs: Costs, kind: TensorType, source: Placement, target: Placement, ratios: Sequence[int]
) -> Transfer:
    nbytes, ranks = float(kind.nbytes), range(len(ratios))
    if source is PARTIAL and target is REPLICATED:
        return costs.all_reduce(nbytes)
    before, after = ([_part(kind, p, ratios, rank) for rank in ranks] for p in (source, target))
    if isinstance(source, Sharded) and isinstance(target, Sharded):
        return costs.all_to_all(nbytes, before, after)
    return costs.reduce_scatter(nbytes, after if isinstance(target, Sharded) else before)


def _part(kind: TensorType, placement: Placement, ratios: Sequence[int], rank: int) -> float:
    if not isinstance(placement, Sharded):
        return 1.0
    bounds = placement.bounds(kind.shape, ratios)
    return (bounds[rank + 1] - bounds[rank]) / max(1, bounds[-1])
