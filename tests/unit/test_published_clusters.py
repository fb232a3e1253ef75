"""`benchmarks/published_clusters`: reconstructed policies against exhaustive search."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published_clusters import data_parallel, graphs, hap, heterog, models, poplar_plan
from published_clusters import programme_search as programmes
from published_clusters.cluster import GTX_1080_TI, P100_PCIE_16, V100_SXM2, Cluster, Host
from published_clusters.costs import Costs
from published_clusters.decision import Decisions
from published_clusters.models import linear
from published_clusters.simulation import simulate
from published_clusters.step import Part, Step

from poplar.programmes.search.composition import data_parallel as data_parallel_programme
from poplar.simulator.step_simulation import simulate as simulate_plan
from poplar.values.plan import Plan

BATCH = 32


def cluster(*hosts, overlap=0.6):
    described = [Host(device=d, ranks=n, network_bytes_per_s=rate) for d, n, rate in hosts]
    return Cluster(name="tiny", hosts=tuple(described), overlap=overlap)


SLOW = cluster((V100_SXM2, 1, 1e9), (P100_PCIE_16, 2, 1e9))
FAST = cluster((V100_SXM2, 2, 1e11), (GTX_1080_TI, 2, 5e10))
WIDE = (linear("a", 64, 8192), linear("b", 8192, 8192), linear("c", 8192, 64))
LONG = (linear("a", 256, 256, rows=512), linear("b", 256, 256, rows=512), linear("c", 256, 8))
MIXTURE = models.bert_moe(experts=6, layers=2, width=64, tokens=32)[1:6]


def seconds(of, decisions):
    return simulate(of, decisions.step(Costs(of)))


@pytest.mark.parametrize("of", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("layers", [WIDE, LONG, MIXTURE], ids=["wide", "long", "mixture"])
def test_hap_finds_the_fastest_programme(of, layers):
    costs, ratios = Costs(of), [1 / of.world_size] * of.world_size
    layers = layers[-3:]
    found = hap.predicted(costs, hap.fastest_programme(costs, layers, BATCH, ratios))
    every = [
        Decisions(layers=layers, decisions=chosen, global_batch=BATCH)
        for chosen in itertools.product(*(hap.options(one, BATCH, ratios, None) for one in layers))
        if chosen[-1].compute != "columns"
        if not any(
            a.compute == "columns" and b.compute == "experts" for a, b in itertools.pairwise(chosen)
        )
    ]
    assert found == pytest.approx(min(hap.predicted(costs, one) for one in every))


def test_ratios_are_those_of_a_grid_search():
    costs, batch = Costs(FAST), 4000
    even = [1 / 4] * 4
    programme = hap.fastest_programme(costs, LONG, batch, even)

    def whole(ratios):
        decisions = tuple(
            replace(one, batch=data_parallel.batch_shares(batch, ratios))
            for one in programme.decisions
        )
        return hap.predicted(costs, replace(programme, decisions=decisions))

    assert {one.compute for one in programme.decisions} == {"batch"}
    found = hap.best_ratios(costs, programme, even)
    assert sum(found) == pytest.approx(1.0)
    assert found[0] == found[1] > found[2] == found[3]
    grid = [(x / 400, x / 400, 0.5 - x / 400, 0.5 - x / 400) for x in range(1, 200)]
    assert whole(found) <= min(map(whole, grid)) * 1.005


@pytest.mark.parametrize("of", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("layers", [WIDE, LONG], ids=["wide", "long"])
def test_heterog_finds_the_fastest_decisions(of, layers):
    costs = Costs(of)
    servers = heterog.placed_servers(costs, layers)
    every = [
        Decisions(layers=layers, decisions=chosen, global_batch=BATCH, largest_first=first)
        for chosen in itertools.product(*(heterog.options(costs, BATCH, s) for s in servers))
        for first in (False, True)
    ]
    found = seconds(of, heterog.heterog(costs, layers, BATCH))
    assert found == pytest.approx(min(seconds(of, one) for one in every), rel=0.02)


def part(forward, backward, **more):
    ranks = len(forward)
    return Part(forward=forward, backward=backward, update=(0.0,) * ranks, **more)


def test_gradients_move_during_the_backward_of_earlier_layers():
    two = cluster((V100_SXM2, 1, 1e9), (V100_SXM2, 1, 1e9), overlap=1.0)
    gradient = (2.0,) * 4
    first = part((1.0, 1.0), (3.0, 3.0), gradient=gradient)
    second = part((1.0, 2.0), (1.0, 1.0), gradient=gradient)
    # The slower rank ends the backward of both at 1 + 2 + 1 + 3 = 7.
    assert simulate(two, Step(parts=(first, second))) == pytest.approx(9.0)
    half = replace(two, overlap=0.5)
    # For 2 seconds the backward of the first layer runs at half its speed.
    assert simulate(half, Step(parts=(first, second))) == pytest.approx(10.0)


@pytest.mark.parametrize("of", [SLOW, FAST], ids=["slow", "fast"])
def test_plans_take_as_long_as_in_the_simulator_of_plans(of):
    layers = models.bert(6, 768, 128, 1000, 1000)
    profile = poplar_plan.profile(Costs(of), layers, BATCH)
    plan = Plan.even(of.world_size, BATCH, BATCH, 0)
    ours = seconds(of, poplar_plan.decisions_of(plan, layers, BATCH))
    assert ours == pytest.approx(seconds(of, data_parallel.even(Costs(of), layers, BATCH)))
    assert ours == pytest.approx(simulate_plan(profile, plan).step_seconds, rel=0.1)


def test_the_programme_of_data_parallelism_takes_as_long_as_its_decisions():
    costs, layers = Costs(SLOW), models.HAP_MODELS["vgg19"](3)
    graph = graphs.graph("vgg19", 3, BATCH)
    ratios = programmes.search_costs(costs, graph, BATCH).ratios
    programme = data_parallel_programme(graph, ratios)
    step = programmes.programme_step(costs, graph, programme, layers, BATCH)
    decisions = data_parallel.by_flops(costs, layers, BATCH)
    assert simulate(SLOW, step) == pytest.approx(seconds(SLOW, decisions), rel=0.05)
    found = next(programmes.found_programmes(graph, costs, BATCH))
    faster = programmes.programme_step(costs, graph, found, layers, BATCH)
    assert simulate(SLOW, faster) < simulate(SLOW, step)
    assert not [*programmes.found_programmes(graph, costs, BATCH, limit=2)]
