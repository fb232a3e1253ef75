"""The fastest programme: exhaustive search finds none that is faster."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poplar.programmes.graph.graph import LEAVES, PARAMETER, Graph
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import strategies_of
from poplar.programmes.run.exported_graph import export_loss
from poplar.programmes.search import search
from poplar.programmes.search.composition import batch_placements, composed, data_parallel
from poplar.programmes.search.costs import ClusterCosts, Links, RankSeconds
from poplar.programmes.search.search import fastest_in
from poplar.programmes.search.space import SearchSpace, axis_units
from poplar.programmes.search.step_terms import StepTerms

SAMPLES = 6


class Pair(nn.Module):
    """Two linear layers: few samples and wide layers call for sharded weights."""

    def __init__(self, width: int = 4, hidden: int = 8):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x))).sum()


class Heads(nn.Module):
    """A linear layer whose columns become heads."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 8, bias=False)

    def forward(self, x):
        return self.project(x).view(SAMPLES, 4, 2).softmax(-1).mean()


class Experts(nn.Module):
    """A product with weights of several experts."""

    def __init__(self, width=4, hidden=5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, hidden))

    def forward(self, x):
        inputs = torch.einsum("be,bw->ebw", x[:, :3], x)
        return torch.einsum("ebw,ewh->ebh", inputs, self.weight).tanh().sum()


class Table(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))

    def forward(self, x):
        rows = F.embedding(x.argmax(-1), self.weight)
        return F.linear(rows, self.weight).square().sum()


class Root(nn.Module):
    """A loss that is not linear in its last sum."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return (x * self.weight).square().sum().sqrt()


MODELS = {model.__name__: model for model in (Pair, Heads, Experts, Table, Root)}


@cache
def graph_of(name: str) -> Graph:
    model, batch = MODELS[name]().double(), torch.rand(SAMPLES, 4, dtype=torch.float64)
    return export_loss(model, lambda model, batch: model(batch), batch).graph


def programme_costs(
    ratios: tuple[int, ...],
    operations_per_second: tuple[float, ...],
    bytes_per_second: float,
    latency: float = 0.0,
) -> ClusterCosts:
    """Costs without a part of a pass that is not divided."""
    ranks = len(ratios)
    links = Links((1.0 / bytes_per_second,) * ranks, (1.0 / bytes_per_second,) * ranks, latency)
    return ClusterCosts(
        ratios=ratios,
        compute=RankSeconds((0.0,) * ranks, tuple(1.0 / own for own in operations_per_second)),
        work=1.0,
        reducing=links,
        moving=links,
        element_seconds=2.0 * (1.0 - 1.0 / ranks) * 4.0 / bytes_per_second,
    )


COSTS = {
    "compute": programme_costs((2, 1), (2e3, 1e3), 1e9, latency=1e-9),
    "bytes": programme_costs((2, 1), (2e9, 1e9), 1e3),
    "latency": programme_costs((2, 0, 1), (2e5, 1e3, 1e5), 1e6, latency=1e-3),
}


def fastest_programme(graph: Graph, costs: ClusterCosts, width: int | None = None) -> Programme:
    found = fastest_in(SearchSpace.of(graph), costs, width=width)
    assert found is not None
    return found


def programme_seconds(graph: Graph, programme: Programme, costs: ClusterCosts) -> float:
    return costs.programme_seconds(StepTerms.of(graph, programme))


def every_programme(graph: Graph, costs: ClusterCosts):
    """All combinations of strategies; a parameter is placed as its first reader reads it."""
    nodes = [node for node in graph.nodes.values() if node.operator not in LEAVES]
    units = axis_units(graph)
    choices = [
        list(strategies_of(graph, node, lambda axis, own=units[node.name]: own[axis]))
        for node in nodes
    ]
    for combination in itertools.product(*choices):
        chosen = {node.name: strategy for node, strategy in zip(nodes, combination, strict=True)}
        leaves = {n.name: REPLICATED for n in graph.nodes.values() if n.operator in LEAVES}
        leaves |= batch_placements(graph)
        for node, strategy in reversed(list(zip(nodes, combination, strict=True))):
            for name, placement in zip(node.inputs, strategy.inputs, strict=True):
                if graph.nodes[name].operator == PARAMETER:
                    leaves[name] = placement
        if PARTIAL in leaves.values():
            continue
        programme = composed(graph, costs.ratios, leaves, chosen)
        try:
            programme.collectives(graph)
        except ValueError:  # values would have to become partial
            continue
        yield programme


@pytest.mark.every_combination
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Experts"])
def test_no_programme_of_exhaustive_search_is_faster(name, costs):
    graph = graph_of(name)
    found = fastest_programme(graph, COSTS[costs])
    loss = found.placements[graph.output]
    fastest = min(
        programme_seconds(graph, programme, COSTS[costs])
        for programme in every_programme(graph, COSTS[costs])
        if programme.placements[graph.output] == loss
    )
    assert programme_seconds(graph, found, COSTS[costs]) == pytest.approx(fastest)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", MODELS)
def test_data_parallelism_is_never_predicted_faster(name, costs):
    graph = graph_of(name)
    found = fastest_programme(graph, COSTS[costs])
    known = data_parallel(graph, COSTS[costs].ratios)
    seconds = [programme_seconds(graph, one, COSTS[costs]) for one in (found, known)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


def test_wide_layers_and_few_samples_are_sharded_by_columns_and_rows():
    model = Pair(width=64, hidden=256)
    graph = export_loss(model, lambda model, x: model(x), torch.rand(4, 64)).graph
    found = fastest_programme(graph, COSTS["bytes"])
    assert found.parameters(graph) == {"up.weight": Sharded(0), "down.weight": Sharded(1)}


def test_wide_experts_are_on_the_ranks_that_compute_them():
    model = Experts(width=64, hidden=128)
    graph = export_loss(model, lambda model, x: model(x), torch.rand(4, 64)).graph
    found = fastest_programme(graph, COSTS["bytes"])
    assert found.parameters(graph) == {"weight": Sharded(0)}


def test_many_samples_of_narrow_layers_are_data_parallel():
    graph = export_loss(Pair(), lambda model, x: model(x), torch.rand(4096, 4)).graph
    found = fastest_programme(graph, COSTS["bytes"])
    assert set(found.parameters(graph).values()) == {REPLICATED}
    assert found.collectives(graph) == ()
    seconds = [
        programme_seconds(graph, one, COSTS["bytes"])
        for one in (found, data_parallel(graph, (2, 1)))
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_losses_are_partial_where_they_can_be():
    placements = {
        name: fastest_programme(graph_of(name), COSTS["compute"]).placements for name in MODELS
    }
    losses = {name: placements[name][graph_of(name).output] for name in MODELS}
    assert losses == {name: REPLICATED if name == "Root" else PARTIAL for name in MODELS}


def test_columns_that_become_heads_are_cut_between_heads():
    assert axis_units(graph_of("Heads"))["linear"]["columns"] == {1, 2}


def test_a_width_bounds_the_states_of_a_search(monkeypatch):
    continued = Counter()
    following = search._Search._following

    def counted(self, visit):
        continued[visit.placed] += 1
        return following(self, visit)

    monkeypatch.setattr(search._Search, "_following", counted)
    graph = graph_of("Pair")
    every = fastest_programme(graph, COSTS["bytes"])
    assert max(continued.values()) > 2
    continued.clear()
    some = fastest_programme(graph, COSTS["bytes"], width=2)
    assert max(continued.values()) == 2
    seconds = [programme_seconds(graph, one, COSTS["bytes"]) for one in (every, some)]
    assert seconds[0] <= seconds[1]
