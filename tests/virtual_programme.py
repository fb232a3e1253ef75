"""Runs programmes on virtual ranks, all in this process and in one autograd graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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


def random_programme(graph: Graph, ratios: tuple[int, ...], draws: random.Random) -> Programme:
    """A programme with a random strategy of each node, among those that can be reached."""
    nodes = [node for node in graph.nodes.values() if node.operator not in LEAVES]
    units = axis_units(graph)
    placements: dict[str, Placement] = dict(batch_placements(graph))
    chosen: dict[str, Strategy] = {}
    for node in nodes:
        choices = list(strategies_of(graph, node, units[node.name].__getitem__))
        draws.shuffle(choices)
        chosen[node.name] = next(s for s in choices if can_read(graph, node, s, placements))
        for name, target in zip(node.inputs, chosen[node.name].inputs, strict=True):
            if graph.nodes[name].operator == PARAMETER and target is not None:
                placements.setdefault(name, target)
        placements[node.name] = chosen[node.name].output
    leaves = [node.name for node in graph.nodes.values() if node.operator in LEAVES]
    placed = {name: placements.get(name, REPLICATED) for name in leaves}
    return composed(graph, ratios, placed, chosen)


def can_read(
    graph: Graph, node: Node, strategy: Strategy, placements: Mapping[str, Placement]
) -> bool:
    for name, target in zip(node.inputs, strategy.inputs, strict=True):
        own = placements.get(name, REPLICATED)
        is_moved = target is not None and target != own
        if is_moved and (target is PARTIAL or graph.nodes[name].returns_list):
            return False
    return True


def gradient_of(tensors: list[Tensor], placement: Placement) -> Tensor:
    own = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    return assembled(own, adjoint(placement))


def converted(
    values: list[Any],
    name: str,
    programme: Programme,
    target: Placement | None,
    announced: set[tuple[str, Placement, Placement]],
) -> list[Any]:
    """Every rank's value in another placement; its collective must be in the programme."""
    source = programme.placements[name]
    if target is None or target == source:
        return values
    assert (name, source, target) in announced, f"{name}: no collective {source} to {target}"
    if source is REPLICATED:  # no communication: each rank has its own tensor
        return [parts(value, target, programme.ratios)[rank] for rank, value in enumerate(values)]
    return parts(assembled(values, source), target, programme.ratios)
