"""Programmes on real ranks: loss and gradients are those of one process with the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import ranks as harness
import torch
from models import IGNORED, ModelSpec, build, data
from ranks import Pool
from subset import choose
from torch import Tensor, nn
from torch.nn import functional as F
from virtual_programme import following, random_programme
from virtual_ranks import adjoint, assembled

from poplar.comm import Group, connect
from poplar.programmes.graph.graph import INPUT
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.collectives import own_part
from poplar.programmes.run.execution import Execution
from poplar.programmes.run.exported_graph import ExportedLoss, export_loss
from poplar.programmes.search.composition import data_parallel

CPU = torch.device("cpu")
RATIOS = ((2, 1), (4, 2, 1), (1, 0, 2), (3, 1, 0, 2))
WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    """Attention with separate projections, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, WIDTH)
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        samples, length, _ = x.shape
        q, k, v = (
            layer(x).view(samples, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(samples, length, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


class Gated(nn.Module):
    """Values without gradient beside values with one: all ranks must agree on which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, WIDTH)
        self.up, self.head = nn.Linear(WIDTH, 14), nn.Linear(14, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.up(x - x.detach().mean(-1, keepdim=True))
        x = x * x.detach().sigmoid() + torch.ones_like(x.tanh())
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build(ModelSpec(kind="mlp", blocks=2, width=6, hidden=9)),
    "attention": Attention,
    "gated": Gated,
    "transformer": lambda: build(ModelSpec(blocks=1, width=8, hidden=12)),
}


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over the tokens that are not ignored, on all ranks."""
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORED)


@cache
def trained(kind: str, samples: int) -> tuple[ExportedLoss, dict[str, Any]]:
    """The exported loss; and what one process computes: parameters, batch, loss and gradients."""
    torch.manual_seed(1)
    model, batch = MODELS[kind]().double(), data(samples, seed=2, masked=True)
    exported = export_loss(model, mean_loss, batch)
    loss = mean_loss(model, batch)
    loss.backward()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    gradients = {name: value.grad for name, value in model.named_parameters()}
    whole = {"parameters": parameters, "batch": batch, "loss": loss, "gradients": gradients}
    return exported, {**whole, "loss": loss.detach()}


def run_all(
    transport: str, exported: ExportedLoss, programmes: list[Programme], whole: dict[str, Any]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """This rank's loss and gradients, by programme."""
    comm = connect(Group.of(harness.group(), None), transport)
    return [run_programme(comm, exported, programme, whole) for programme in programmes]


def run_programme(
    comm: Any, exported: ExportedLoss, programme: Programme, whole: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    graph, ratios, rank = exported.graph, programme.ratios, comm.group.rank
    execution = Execution(comm, graph, programme, exported.constants, CPU)
    parameters = {
        name: own_part(whole["parameters"][name], placement, ratios, rank).clone().requires_grad_()
        for name, placement in programme.parameters(graph).items()
    }
    batch = {
        path: own_part(whole["batch"][path[2:-2]], programme.placements[node.name], ratios, rank)
        for path, node in graph.batch.items()
    }
    errors: list[Exception] = []
    loss = execution.loss(parameters, batch, {}, errors)
    assert not errors
    loss.backward()
    return loss.detach(), {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in parameters.items()
    }


def check(
    ranks: Pool,
    kind: str,
    samples: int,
    programmes: list[Programme],
    transport: str = "auto",
) -> None:
    """Compare with one process, up to the rounding of float64."""
    exported, whole = trained(kind, samples)
    by_rank = ranks.run(
        run_all, transport, exported, programmes, whole, ranks=programmes[0].world_size
    )
    for programme, of_ranks in zip(programmes, zip(*by_rank, strict=True), strict=True):
        losses, gradients = zip(*of_ranks, strict=True)
        close(sum(losses), whole["loss"], "the loss", programme)
        for name, placement in programme.parameters(exported.graph).items():
            gradient = assembled([own[name] for own in gradients], adjoint(placement))
            close(gradient, whole["gradients"][name], name, programme)


def close(got: Tensor, expected: Tensor, name: str, programme: Programme) -> None:
    def message(text: str) -> str:
        return f"{name}: {text}\n{programme}"

    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=message)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("samples", [6, 1])
@pytest.mark.parametrize("ratios", RATIOS)
def test_any_programme_computes_the_loss_and_gradients_of_one_process(
    ranks: Pool, kind: str, samples: int, ratios: tuple[int, ...]
) -> None:
    exported, _ = trained(kind, samples)
    draw = random.Random(len(kind) + samples)
    times = choose(quick=3, full=20)
    programmes = [random_programme(exported.graph, ratios, draw) for _ in range(times)]
    check(ranks, kind, samples, programmes)


def tensor_parallel(exported: ExportedLoss, ratios: tuple[int, ...]) -> Programme:
    """Pairs of linear layers, the first by columns and the second by rows; attention by heads."""
    head = WIDTH // HEADS
    both = ("weight", "bias")
    columns = {f"{name}.{kind}": head for name in ("query", "key", "value") for kind in both}
    columns |= {f"up.{kind}": 1 for kind in both}
    rows = {"project.weight": head, "down.weight": 1}
    placements = {name: Sharded(0, unit) for name, unit in columns.items()}
    placements |= {name: Sharded(1, unit) for name, unit in rows.items()}
    graph = exported.graph
    leaves = {graph.parameters[name].name: own for name, own in placements.items()}
    return following(graph, ratios, leaves)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("samples", [6, 1])
@pytest.mark.parametrize("ratios", RATIOS)
def test_tensor_and_data_parallelism_are_equal_to_one_process(
    ranks: Pool, transport: str, samples: int, ratios: tuple[int, ...]
) -> None:
    exported, _ = trained("attention", samples)
    programmes = [data_parallel(exported.graph, ratios), tensor_parallel(exported, ratios)]
    check(ranks, "attention", samples, programmes, transport)


def test_pairs_of_layers_communicate_once_each() -> None:
    exported, _ = trained("attention", 6)
    programme = tensor_parallel(exported, (2, 1))
    moved = [c for c in programme.collectives(exported.graph) if c.source is not REPLICATED]
    assert [(c.source, c.target) for c in moved] == [(PARTIAL, REPLICATED)] * 2


def test_incomplete_programmes_are_refused(ranks: Pool) -> None:
    exported, _ = trained("attention", 6)
    programme = tensor_parallel(exported, (2, 1))
    name = next(name for name, node in exported.graph.nodes.items() if node.operator == INPUT)
    loss = exported.graph.output
    without_node = {k: v for k, v in programme.placements.items() if k != name}
    first, read = next(iter(programme.inputs.items()))  # leaves
    made_partial = {**programme.inputs, first: (PARTIAL,) * len(read)}
    cases = (
        (replace(programme, ratios=(1, 1, 1)), "the programme is for 3 ranks, the group has 2"),
        (replace(programme, inputs=made_partial), "no collective makes that of"),
        (replace(programme, placements=without_node), f"must have the graph's node '{name}'"),
        (replace(programme, inputs={}), "Programme.inputs must have"),
        (
            replace(programme, placements={**programme.placements, loss: PARTIAL}),
            f"node '{loss}', aten.div.Tensor: no strategy",
        ),
    )
    for messages in ranks.run(refusals, exported, [case[0] for case in cases], ranks=2):
        for message, (_, expected) in zip(messages, cases, strict=True):
            assert expected in message


def refusals(exported: ExportedLoss, programmes: list[Programme]) -> list[str]:
    comm, messages = connect(Group.of(harness.group(), None), "auto"), []
    for programme in programmes:
        with harness.catching() as caught:
            Execution(comm, exported.graph, programme, exported.constants, CPU)
        messages += [failure.message for failure in caught if failure.type == "ValueError"]
    return messages
