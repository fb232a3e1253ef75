"""Runs programmes on virtual ranks, all in this process and in one autograd graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from virtual_ranks import adjoint, assembled, parts

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import local_call, strategies_of
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.run.exported_graph import ExportedLoss
from poplar.programmes.run.local_execution import run_local
from poplar.programmes.search.composition import batch_placements, composed
from poplar.programmes.search.space import axis_units

CPU = torch.device("cpu")


def of_one_process(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of each parameter that has one."""
    model.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def leaf_values(found: ExportedLoss, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The leaves of a graph, by node: of the whole batch and model."""
    given = {**dict(model.named_parameters()), **found.tensors(batch, CPU)}
    nodes = (*found.graph.parameters.values(), *found.graph.batch.values())
    return {**found.constants, **{node.name: given[node.source] for node in nodes}}


def loss_and_gradients(
    graph: Graph, programme: Programme, leaves: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of each parameter, put together from all ranks.

    Args:
        leaves: of the whole batch and model, by node.
    """
    ranks = range(programme.world_size)
    announced = {tuple(collective) for collective in programme.collectives(graph)}
    values: dict[str, list[Any]] = {}
    trained: dict[str, list[Tensor]] = {}
    for name, node in graph.nodes.items():
        own = programme.placements[name]
        if node.operator in LEAVES:
            values[name] = parts(leaves[name].detach(), own, programme.ratios)
            if node.operator == PARAMETER and leaves[name].requires_grad:
                trained[name] = [tensor.requires_grad_() for tensor in values[name]]
            continue
        read = programme.inputs[name]
        inputs = {
            source: converted(values[source], source, programme, target, announced)
            for source, target in zip(node.inputs, read, strict=True)
        }
        values[name] = []
        for rank in ranks:
            call = local_call(graph, node, read, own, programme.ratios, rank)
            of_rank = {source: tensors[rank] for source, tensors in inputs.items()}
            values[name].append(run_local(call, of_rank.__getitem__, CPU))
    own = programme.placements[graph.output]
    losses = values[graph.output]
    # Replicated: the seed is divided over ranks.
    total = losses[0] if own is REPLICATED else sum(losses)
    total.backward()
    gradients = {
        graph.nodes[name].source: gradient_of(tensors, programme.placements[name])
        for name, tensors in trained.items()
    }
    return assembled([x.detach() for x in losses], own), gradients


def random_programme(graph: Graph, ratios: Sequence[int], draws: random.Random) -> Programme:
    """A programme with a random strategy of each node, among those that can be reached."""
    return programme_of(graph, ratios, batch_placements(graph), lambda _, some: draws.choice(some))


def following(graph: Graph, ratios: Sequence[int], leaves: Mapping[str, Placement]) -> Programme:
    """A programme in which each node moves as few of its inputs as it can.

    Args:
        leaves: by node; others are replicated.
    """

    def nearest(sources: Sequence[Placement], possible: Sequence[Strategy]) -> Strategy:
        def cost(strategy: Strategy) -> int:  # a slice needs no communication
            pairs = zip(sources, strategy.inputs, strict=True)
            return sum(1 if own is REPLICATED else 10 for own, target in pairs if own != target)

        return min(possible, key=cost)

    names = [node.name for node in graph.nodes.values() if node.operator in LEAVES]
    return programme_of(graph, ratios, dict.fromkeys(names, REPLICATED) | dict(leaves), nearest)


def programme_of(
    graph: Graph,
    ratios: Sequence[int],
    leaves: Mapping[str, Placement],
    choose: Callable[[Sequence[Placement], Sequence[Strategy]], Strategy],
) -> Programme:
    """The programme of strategies that are chosen one node after the other.

    Args:
        leaves: by node; other parameters are as their first readers need them.
        choose: from where a node's inputs are, and its strategies that can be reached.
    """
    units, placements = axis_units(graph), dict(leaves)
    chosen: dict[str, Strategy] = {}
    for name, node in graph.nodes.items():
        if node.operator in LEAVES:
            continue
        sources = [placements.get(source, REPLICATED) for source in node.inputs]
        every = strategies_of(graph, node, units[name].__getitem__)
        chosen[name] = choose(sources, [s for s in every if can_read(graph, node, s, sources)])
        for source, target in zip(node.inputs, chosen[name].inputs, strict=True):
            if graph.nodes[source].operator == PARAMETER:
                placements.setdefault(source, target)
        placements[name] = chosen[name].output
    placed = {name: placements.get(name, REPLICATED) for name in graph.nodes}
    return composed(graph, ratios, placed, chosen)


def can_read(graph: Graph, node: Node, strategy: Strategy, sources: Sequence[Placement]) -> bool:
    for name, own, target in zip(node.inputs, sources, strategy.inputs, strict=True):
        if target != own and (target is PARTIAL or graph.nodes[name].returns_list):
            return False
    return True


def gradient_of(tensors: list[Tensor], placement: Placement) -> Tensor:
    own = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    return assembled(own, adjoint(placement))


def converted(
    values: list[Any],
    name: str,
    programme: Programme,
    target: Placement,
    announced: set[tuple[str, Placement, Placement]],
) -> list[Any]:
    """Every rank's value in another placement; its collective must be in the programme."""
    source = programme.placements[name]
    if target == source:
        return values
    assert (name, source, target) in announced, f"{name}: no collective {source} to {target}"
    if source is REPLICATED:  # no communication: each rank has its own tensor
        return [parts(value, target, programme.ratios)[rank] for rank, value in enumerate(values)]
    return parts(assembled(values, source), target, programme.ratios)
