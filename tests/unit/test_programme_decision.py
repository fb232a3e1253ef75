"""Decisions about programmes: predictions agree with those of plans, ratios are the best ones, and
data parallelism is kept unless a programme is predicted to be faster."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import planning_oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from poplar.planner.memory_shortfall import DoesNotFit
from poplar.planner.prediction import predict
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.exported_graph import export_loss
from poplar.programmes.search.composition import data_parallel
from poplar.programmes.search.decision import plan_programme
from poplar.programmes.search.explanation import explain_programme
from poplar.programmes.search.ratios import best_ratios
from poplar.programmes.search.search import fastest_in
from poplar.programmes.search.space import SearchSpace
from poplar.programmes.search.step_model import StepModel
from poplar.programmes.search.step_terms import StepTerms, parts_of
from poplar.values.plan import Plan
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import encoder
import images
import mixture
import vit

GIB = 2**30
FAST, SLOW = 1e10, 1e6
"""Bytes per second of links."""


class Pair(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 256):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x))).pow(2).mean()


def text(samples: int, length: int = 16):
    tokens = torch.zeros(2, samples, length, dtype=torch.long)
    return {"input": tokens[0], "places": tokens[1, :, :3], "target": tokens[1, :, :3].contiguous()}


def pictures(samples: int):
    target = torch.zeros(samples, dtype=torch.long)
    return {"input": torch.zeros(samples, 3, 32, 32), "target": target}


TASKS = {
    "pair": (Pair, lambda model, x: model(x), lambda samples: torch.zeros(samples, 64)),
    "encoder": (
        lambda: encoder.Encoder(encoder.SIZES["tiny"]),
        encoder.masked_byte_loss,
        lambda samples: text(samples, 64),
    ),
    "vit": (lambda: vit.ViT(vit.SIZES["tiny"]), images.image_loss, pictures),
    "mixture": (
        lambda: mixture.Mixture(dataclasses.replace(mixture.SIZES["tiny"], experts=16)),
        mixture.mixture_loss,
        text,
    ),
}


@cache
def graph_of(task: str, samples: int) -> Graph:
    new, loss_fn, data = TASKS[task]
    return export_loss(new(), loss_fn, data(samples)).graph


def numel_of(graph: Graph) -> int:
    return sum(node.output.numel for node in graph.parameters.values())


def cluster_of(
    graph: Graph,
    speeds=(2.0, 1.0),
    bytes_per_second=SLOW,
    memory=GIB,
    latency=1e-5,
    largest=64,
    sample_bytes=2**10,
):
    """Ranks of these speeds relative to each other, with passes of 1 ms and 1 ms per sample."""
    numel, ranks = numel_of(graph), len(speeds)
    devices = tuple(
        DeviceProfile(
            name=f"device of speed {speed}",
            memory_bytes=memory,
            points=tuple(
                BatchPoint(
                    batch=b, seconds=(1e-3 + 1e-3 * b) / speed, activation_bytes=sample_bytes * b
                )
                for b in (1, 2, largest)
            ),
            optimizer_seconds=1e-4 / speed,
        )
        for speed in speeds
    )
    seconds = numel * 4 * (ranks - 1) / ranks / bytes_per_second
    network = NetworkProfile(
        reduce_scatter_seconds=seconds,
        all_gather_seconds=seconds,
        send_seconds_per_byte=(1 / bytes_per_second,) * ranks,
        receive_seconds_per_byte=(1 / bytes_per_second,) * ranks,
        collective_latency_seconds=(latency,) * 2,
    )
    model = ModelProfile(unit_numels=(numel,))
    return ClusterProfile(devices=devices, model=model, network=network, memory_reserve=0.0)


def plan_of(samples, stage=1) -> Plan:
    return Plan.manual(samples, stage=stage)


# Predictions


@pytest.mark.parametrize("task", ["pair", "encoder", "mixture"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallelism_is_predicted_as_its_plan(task, ranks):
    graph, compared = graph_of(task, 12), 0
    for seed in range(30):
        draw = random.Random(seed)
        cluster = planning_oracle.random_cluster(draw, ranks, stage=1)
        samples = [0] * ranks
        for _ in range(12):
            samples[draw.randrange(ranks)] += 1
        plan = plan_of(samples)
        try:
            expected = predict(cluster, plan).step_seconds
        except DoesNotFit:
            continue
        compared += 1
        model = StepModel(cluster, graph, plan)
        step = model.step(model.data_parallel, tuple(samples))
        assert step.compute == pytest.approx(
            max(model.stage.pass_seconds(rank, own) for rank, own in enumerate(samples)), rel=0.02
        )
        # Programmes of data parallelism also add up a few numbers.
        assert step.total - step.collectives == pytest.approx(expected, rel=0.02, abs=1e-9), seed
    assert compared > 1


def test_the_fixed_part_of_a_pass_is_not_divided():
    graph = graph_of("pair", 12)
    model = StepModel(cluster_of(graph, (1.0, 1.0)), graph, plan_of((6, 6)))
    seconds = model.rank_seconds((6, 6))
    assert seconds.fixed == pytest.approx((1e-3, 1e-3), rel=0.01)
    assert seconds.slowest((0.0, 0.0)) == pytest.approx(1e-3, rel=0.01)
    assert seconds.slowest((1.0, 1.0)) == pytest.approx(13e-3, rel=0.05)


def test_sharded_parameters_have_no_gradient_communication():
    graph = graph_of("pair", 4)
    model = StepModel(cluster_of(graph), graph, plan_of((3, 1)))
    found = fastest_in(SearchSpace.of(graph), model.costs((3, 1)))
    assert Sharded(0) in found.parameters(graph).values()
    terms = StepTerms.of(graph, found)
    assert terms.replicated_fraction < 0.1
    alone, all_of_it = model.step(terms, (3, 1)), model.step(model.data_parallel, (3, 1))
    assert alone.gradients + alone.update < 0.2 * (all_of_it.gradients + all_of_it.update)
    assert alone.collectives > all_of_it.collectives


def test_sharded_parameters_take_memory_in_proportion():
    graph = graph_of("pair", 4)
    model = StepModel(cluster_of(graph), graph, plan_of((3, 1)))
    programme = fastest_in(SearchSpace.of(graph), model.costs((3, 1)))
    terms = StepTerms.of(graph, programme)
    saved = [
        model.memory_bytes(model.data_parallel, (3, 1), rank)
        - model.memory_bytes(terms, (3, 1), rank)
        for rank in (0, 1)
    ]
    assert saved[1] > saved[0]
    assert saved[1] > 0.5 * 8 * numel_of(graph)


def test_a_programme_of_a_checkpointed_model_holds_all_activations():
    """The passes that were measured recompute, and the graph does not."""
    graph, sample_bytes = graph_of("pair", 4), (1, 2**20)
    checkpointed, plain = (
        StepModel(cluster_of(graph, sample_bytes=each), graph, plan_of((3, 1)))
        for each in sample_bytes
    )
    terms = checkpointed.data_parallel
    held = sum(parts_of(units, (3, 1))[0] * numel for units, numel in terms.held.items())
    needed = [model.memory_bytes(terms, (3, 1), 0) for model in (checkpointed, plain)]
    assert 3 < held < 3 * 2**20
    assert needed[0] - held == pytest.approx(needed[1] - 3 * 2**20)


class HeadOnPair(nn.Module):
    """Only the head is trained."""

    def __init__(self):
        super().__init__()
        self.base, self.head = Pair().requires_grad_(False), nn.Linear(64, 8)

    def forward(self, x):
        hidden = self.base.down(F.relu(self.base.up(x)))
        return self.head(hidden).pow(2).mean()


def test_frozen_parameters_have_no_gradients_and_no_state():
    model, x = HeadOnPair(), torch.zeros(4, 64)
    graph = export_loss(model, lambda model, x: model(x), x).graph
    thawed = export_loss(model.requires_grad_(True), lambda model, x: model(x), x).graph
    trained = {name for name, node in graph.parameters.items() if node.is_trained}
    assert trained == {"head.weight", "head.bias"}
    terms = StepTerms.of(graph, data_parallel(graph, (3, 1)))
    assert terms.replicated == 64 * 8 + 8
    every = StepTerms.of(thawed, data_parallel(thawed, (3, 1)))
    assert sum(terms.work.values()) < 0.5 * sum(every.work.values())
    assert sum(terms.held.values()) < 0.5 * sum(every.held.values())

    step_model = StepModel(cluster_of(graph), graph, plan_of((3, 1)))
    programme = data_parallel(graph, (3, 1))
    up = graph.parameters["base.up.weight"]
    placed = {**programme.placements, up.name: Sharded(0)}
    sharded = StepTerms.of(graph, dataclasses.replace(programme, placements=placed))
    assert sharded.replicated_fraction == 1.0
    saved = [
        step_model.memory_bytes(terms, (3, 1), rank)
        - step_model.memory_bytes(sharded, (3, 1), rank)
        for rank in (0, 1)
    ]
    assert saved == [up.output.nbytes / 4, up.output.nbytes * 3 / 4]


# Ratios


@settings(max_examples=25, deadline=None)
@given(
    speeds=st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=2, max_size=3),
    bandwidth=st.sampled_from((SLOW, 1e8, FAST)),
    room=st.sampled_from((3, 6, 12)),
)
def test_ratios_are_those_of_the_fastest_step_that_fits(speeds, bandwidth, room):
    graph = graph_of("pair", 12)
    per_sample = 2**20
    cluster = cluster_of(graph, tuple(speeds), bandwidth, memory=10**9, sample_bytes=per_sample)
    start = Plan.proportional(speeds, 12, 1, 64)
    ratios = tuple(start.samples(rank) for rank in range(len(speeds)))
    found = fastest_in(SearchSpace.of(graph), StepModel(cluster, graph, start).costs(ratios))
    for programme in (found, data_parallel(graph, ratios)):
        terms = StepTerms.of(graph, programme)
        needed = StepModel(cluster, graph, start).memory_bytes(terms, ratios, 0)
        limit = int(needed + per_sample * (room - ratios[0]))
        tight = dataclasses.replace(
            cluster,
            devices=(
                dataclasses.replace(cluster.devices[0], memory_bytes=limit),
                *cluster.devices[1:],
            ),
        )
        model = StepModel(tight, graph, start)
        every = [
            model.step(terms, samples).total
            for samples in itertools.product(range(13), repeat=len(speeds))
            if sum(samples) == 12 and model.fits(terms, samples)
        ]
        best = best_ratios(model, terms, ratios)
        if best is None:
            assert not every
            continue
        assert model.fits(terms, best)
        assert sum(best) == 12
        assert model.step(terms, best).total <= min(every) * 1.001


def test_equal_devices_exchange_samples_together():
    """Pairs of 64 ranks are too many, and no single pair of them makes the step shorter."""
    speeds, samples = [4.0] * 16 + [1.0] * 48, [2] * 64
    graph = graph_of("pair", 128)
    model = StepModel(cluster_of(graph, tuple(speeds), FAST), graph, plan_of(samples))
    with mock.patch.object(model, "step", wraps=model.step) as step:
        best = best_ratios(model, model.data_parallel, tuple(samples))
    in_proportion = (5,) * 16 + (1,) * 48
    terms = model.data_parallel
    assert model.step(terms, best).total <= model.step(terms, in_proportion).total * 1.001
    assert step.call_count < 64 * 63


def test_no_ratios_fit_too_little_memory():
    graph = graph_of("pair", 12)
    plan = plan_of((8, 4))
    model = StepModel(cluster_of(graph, memory=1000), graph, plan)
    assert best_ratios(model, model.data_parallel, (8, 4)) is None


# Decisions


@pytest.mark.parametrize("task", ["pair", "vit", "mixture"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_decision_is_never_predicted_slower_than_the_plan(task, ranks):
    graph, compared = graph_of(task, 12), 0
    for seed in range(6):
        draw = random.Random(seed)
        stage = draw.choice((0, 1, 2, 3))
        cluster = planning_oracle.random_cluster(draw, ranks, stage)
        plan = Plan.proportional([1.0] * ranks, 12, stage, draw.choice((1, 2, 12)))
        try:
            expected = predict(cluster, plan).step_seconds
        except DoesNotFit:
            continue
        compared += 1
        found = plan_programme(graph, cluster, plan)
        assert found.data_parallel_seconds == expected
        assert found.step_seconds <= expected
        assert (found.programme is None) == (found.step_seconds == expected)
        if found.programme is not None:
            assert sum(found.programme.ratios) == 12
            for rank, needed in enumerate(found.memory_bytes):
                device = cluster.devices[rank]
                assert needed <= device.memory_bytes * (1 - cluster.memory_reserve) + 2
    assert compared


def test_many_experts_on_a_slow_network_are_sharded():
    graph = graph_of("mixture", 12)
    found = plan_programme(graph, cluster_of(graph, bytes_per_second=1e8), plan_of((8, 4)))
    assert found.programme is not None
    experts = {n: p for n, p in found.programme.parameters(graph).items() if ".experts.up" in n}
    assert set(experts.values()) == {Sharded(0)}
    assert "blocks.*.mixture.experts.up (" in explain_programme(found, graph)
    numel = sum(graph.nodes[graph.parameters[name].name].output.numel for name in experts)
    assert 0 < found.activation_bytes < 8 * numel  # of reducing and gathering them


@pytest.mark.parametrize(("task", "samples"), [("vit", 48), ("encoder", 96)])
def test_activations_that_outweigh_gradients_are_data_parallel(task, samples):
    graph = graph_of(task, samples)
    for bandwidth in (1e8, FAST):
        plan = plan_of((samples * 2 // 3, samples // 3))
        found = plan_programme(graph, cluster_of(graph, bytes_per_second=bandwidth), plan)
        assert found.programme is None
        assert found.step_seconds == found.data_parallel_seconds
        assert "data parallelism" in explain_programme(found, graph)


@pytest.mark.parametrize("task", ["pair", "mixture"])
def test_ranks_without_samples_take_part(task):
    graph = graph_of(task, 12)
    cluster = cluster_of(graph, (2.0, 1.0, 0.1))
    found = plan_programme(graph, cluster, plan_of((8, 4, 0)))
    assert found.programme is not None
    assert found.programme.ratios[2] == 0


def test_one_rank_needs_no_programme():
    graph = graph_of("pair", 12)
    found = plan_programme(graph, cluster_of(graph, (1.0,)), plan_of((12,)))
    assert found.programme is None
    assert "only one rank" in found.reason


def test_a_batch_that_fits_in_no_single_pass_has_no_programme():
    graph = graph_of("pair", 12)
    cluster = cluster_of(graph, largest=3)
    plan = Plan.proportional((2.0, 1.0), 12, 1, 3)
    found = plan_programme(graph, cluster, plan)
    assert found.programme is None
    assert "one pass" in found.reason


def test_decisions_are_stored_as_json_and_explained():
    graph = graph_of("pair", 4)
    found = plan_programme(graph, cluster_of(graph), plan_of((3, 1)))
    assert found.programme is not None
    stored = json.loads(json.dumps(found.to_dict()))
    assert Programme.from_dict(stored["programme"]) == found.programme
    assert stored["step_seconds"] == found.step_seconds
    text = explain_programme(found, graph)
    assert "times as fast as data parallelism" in text
    assert "up.weight (1 parameter, 16,384 elements): sharded on dimension 0" in text
    percents = re.search(r"shares of the .* replicated parameters: ([\d.]+) %, ([\d.]+) %", text)
    assert percents is not None
    assert [float(part) for part in percents.groups()] == pytest.approx(
        [100 * share for share in found.programme.shares], abs=0.51
    )
