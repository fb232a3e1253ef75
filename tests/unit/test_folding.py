"""Folding: repeated blocks are planned once, with the result of planning all of them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from programme_costs import programme_costs
from torch import nn

from poplar.programmes.graph.graph import LEAVES, Graph
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.run.exported_graph import export_loss
from poplar.programmes.search.folding import folded
from poplar.programmes.search.search import fastest_in
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_terms import StepTerms


class Blocks(nn.Module):
    """Equal residual blocks."""

    def __init__(self, count: int, width: int = 8, hidden: int = 24):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))

    def forward(self, x):
        x = x * 2.0
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.relu(up(x)))
        return x.sum()


class Skipping(Blocks):
    """Blocks whose first output is also read after the last one."""

    def forward(self, x):
        outputs = [x * 2.0]
        for up, down in zip(self.ups, self.downs, strict=True):
            outputs.append(outputs[-1] + down(F.relu(up(outputs[-1]))))
        return (outputs[1] * outputs[-1]).sum()


class Chain(nn.Module):
    """Equal blocks without residual connections: a chain of operators."""

    def __init__(self, count: int, width: int = 8, hidden: int = 24):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))

    def forward(self, x):
        x = x * 2.0
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(F.relu(up(x)))
        return x.sum()


@cache
def graph_of(model, count: int, samples: int) -> Graph:
    return export_loss(model(count), lambda model, x: model(x), torch.rand(samples, 8)).graph


def operators(graph: Graph) -> int:
    return sum(node.operator not in LEAVES for node in graph.nodes.values())


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_blocks_are_one_block(count):
    graph = graph_of(Blocks, count, 6)
    found = folded(graph, smallest_gain=1)
    assert operators(found.graph) == 4 + 2
    up = found.graph.parameters["ups.0.weight"].name
    assert [graph.nodes[name].source for name in found.members(up)] == [
        f"ups.{block}.weight" for block in range(count)
    ]
    assert set(found.carried.values()) == {"mul"}


def test_blocks_that_are_read_later_are_kept_apart():
    graph = graph_of(Skipping, 2, 6)
    assert folded(graph, smallest_gain=1).graph == graph


@pytest.mark.parametrize("speed", [1e3, 1e6])
@pytest.mark.parametrize("samples", [2, 6, 64])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("model", [Blocks, Chain])
def test_folded_blocks_are_planned_as_all_blocks_that_are_placed_alike(
    model, count, samples, speed
):
    graph = graph_of(model, count, samples)
    costs = programme_costs((2, 1), (2e6, 1e6), speed, latency=1e-5)
    every = fastest_in(SearchSpace.of(graph), costs)
    once = fastest_in(SearchSpace.of(graph, fold=True), costs)
    placements = every.programme.placements
    found = folded(graph)
    are_alike = all(
        len({placements[member] for member in group}) == 1 for group in found.repetitions.values()
    ) and all(placements[one] == placements[other] for one, other in found.carried.items())
    if are_alike:
        assert once.seconds == pytest.approx(every.seconds)
    assert once.seconds >= every.seconds * (1 - 1e-9)
    assert once.seconds == pytest.approx(
        costs.programme_seconds(StepTerms.of(graph, once.programme))
    )
    assert once.states <= every.states


def test_repeated_blocks_have_the_same_placements():
    graph = graph_of(Blocks, 3, 2)
    costs = programme_costs((2, 1), (2e9, 1e9), 1e3)
    placements = fastest_in(SearchSpace.of(graph, fold=True), costs).programme.parameters
    assert {placements[f"ups.{block}.weight"] for block in range(3)} == {Sharded(0)}
    assert {placements[f"downs.{block}.weight"] for block in range(3)} == {Sharded(1)}
