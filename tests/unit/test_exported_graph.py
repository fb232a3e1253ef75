"""Graphs of losses: they compute what the model computes, on one rank and divided by samples."""

from __future__ import annotations

import copy
import random
import re
import sys
from functools import cache
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from models import ModelSpec
from subset import choose
from torch import nn
from virtual_programme import leaf_values, loss_and_gradients, of_one_process, random_programme

from poplar.programmes.graph.graph import LEAVES, Node
from poplar.programmes.graph.placement import REPLICATED
from poplar.programmes.rules.registry import without_rules
from poplar.programmes.run import exported_graph, local_execution
from poplar.programmes.run.exported_graph import export_loss
from poplar.programmes.search.composition import data_parallel
from poplar.values.errors import NotExportable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import encoder
import images
import llama
import mixture
import vgg
import vit


def text(samples):
    tokens = torch.randint(256, (2, samples, 12))
    return {"input": tokens[0], "target": tokens[1]}


def masked_text(samples):
    tokens, places = torch.randint(256, (2, samples, 12)), torch.randint(12, (samples, 3))
    return {"input": tokens[0], "places": places, "target": tokens[1, :, :3].contiguous()}


def pictures(samples):
    target = torch.randint(images.CLASSES, (samples,))
    return {"input": torch.randn(samples, 3, 32, 32, dtype=torch.float64), "target": target}


def tokens(samples):
    return models.data(samples, seed=1, masked=True)


def mean_of_counted(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=models.IGNORED)


TASKS = {
    "llama": (llama.Llama, llama.SIZES["tiny"], llama.next_byte_loss, text),
    "encoder": (encoder.Encoder, encoder.SIZES["tiny"], encoder.masked_byte_loss, masked_text),
    "mixture": (mixture.Mixture, mixture.SIZES["tiny"], mixture.mixture_loss, masked_text),
    "vgg": (vgg.VGG, vgg.SIZES["tiny"], images.image_loss, pictures),
    "vit": (vit.ViT, vit.SIZES["tiny"], images.image_loss, pictures),
    "transformer": (models.build, ModelSpec(), mean_of_counted, tokens),
    "tied": (models.build, ModelSpec(tied=True, norm="rms"), mean_of_counted, tokens),
    "checkpointed": (
        models.build,
        ModelSpec(kind="albert", checkpointing=True),
        models.sum_over_samples,
        tokens,
    ),
    "mlp": (models.build, ModelSpec(kind="mlp"), models.mean_over_samples, tokens),
}
"""How the model is built, from what, its loss, and its data for a number of samples."""


@cache
def exported(task, samples):
    torch.manual_seed(3)
    new, config, loss_fn, data = TASKS[task]
    model, batch = new(config).double(), data(samples)
    return model, loss_fn, batch, export_loss(model, loss_fn, batch)


@pytest.mark.parametrize(
    "division",  # samples, and the ratios in which ranks divide them
    choose(  # one export per task serves all tests
        quick=[(4, (2, 1)), (4, (4, 2, 1)), (4, (1, 0, 2)), (1, (1, 1))],
        full=[(4, (1,)), (5, (2, 1)), (7, (4, 2, 1)), (3, (1, 0, 2)), (1, (1, 1))],
    ),
)
@pytest.mark.parametrize("task", TASKS)
def test_ranks_with_parts_of_the_batch_compute_the_loss_and_its_gradients(task, division):
    samples, ratios = division
    *_, found = exported(task, samples)
    check_loss_and_gradients(task, samples, data_parallel(found.graph, ratios))


def check_loss_and_gradients(task, samples, programme):
    model, loss_fn, batch, found = exported(task, samples)
    computed = loss_and_gradients(found.graph, programme, leaf_values(found, model, batch))
    expected = of_one_process(model, loss_fn, batch)
    # The models of the examples compute losses and rotations in float32.
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("task", TASKS)
def test_any_programme_computes_the_loss_and_its_gradients(task, seed):
    *_, found = exported(task, 4)
    draws = random.Random(seed)
    ratios = draws.choice([(2, 1), (4, 2, 1), (1, 0, 2), (0, 1)])
    check_loss_and_gradients(task, 4, random_programme(found.graph, ratios, draws))


@pytest.mark.parametrize("task", TASKS)
def test_operators_of_the_examples_have_rules(task):
    *_, found = exported(task, 4)
    tables = {"aten.arange.default", "aten.arange.start_step"}
    assert {node.operator for node in without_rules(found.graph)} <= tables


@pytest.mark.parametrize("task", TASKS)
def test_data_parallelism_moves_only_numbers(task):
    *_, found = exported(task, 4)
    nodes = found.graph.nodes
    programme = data_parallel(found.graph, (2, 1))
    for collective in programme.collectives(found.graph):
        is_slice = collective.source is REPLICATED
        assert is_slice or nodes[collective.node].output.numel == 1


def loss_of(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            return forward(self, x)

    return Model(), lambda model, batch: model(batch).sum()


def branch(model, x):
    return model.linear(x) if x.sum() > 0 else x


REFUSED = {
    "changes norm.num_batches_tracked, norm.running_mean": lambda model, x: model.norm(x),
    "aten.dropout.default draws random numbers": lambda model, x: model.dropout(x),
    "aten.scaled_dot_product_attention.default draws random numbers": lambda model, x: (
        F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.5)
    ),
    "draws random numbers": lambda model, x: x * torch.rand_like(x),
    "torch.export failed: ": branch,
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_cannot_be_divided_are_refused_with_the_reason(message):
    model, loss_fn = loss_of(REFUSED[message])
    with pytest.raises(NotExportable, match=message) as raised:
        export_loss(model, loss_fn, torch.randn(3, 4))
    assert "a plan without a programme" in str(raised.value)


def test_detached_values_have_no_gradient():
    check_in_float64(lambda model, x: model.linear(x).detach() * model.linear(x), (3, 4))


def check_in_float64(forward, shape):
    """Compare data parallelism and random programmes with one process."""
    model, loss_fn = loss_of(forward)
    draws = random.Random(0)
    drawn = [lambda graph, ratios: random_programme(graph, ratios, draws)] * 8
    x = torch.randn(shape, dtype=torch.float64)
    check_forward(model.double(), loss_fn, x, [data_parallel, *drawn])


def check_forward(model, loss_fn, x, programmes, **tolerances):
    """Compare with one process, which computes in float64."""
    found = export_loss(model, loss_fn, x)
    leaves = leaf_values(found, model, x)
    exact = copy.deepcopy(model).double()
    expected = loss_fn(exact, x.double())
    expected.backward()
    for programme in programmes:
        loss, gradients = loss_and_gradients(found.graph, programme(found.graph, (2, 1)), leaves)
        gradient = gradients["linear.weight"]
        assert loss.dtype is gradient.dtype is x.dtype
        torch.testing.assert_close(loss.double(), expected.detach(), **tolerances)
        torch.testing.assert_close(gradient.double(), exact.linear.weight.grad, **tolerances)


MEANS = {
    "mse_loss": lambda model, x: F.mse_loss(model.linear(x), torch.zeros_like(x)),
    "mean": lambda model, x: model.linear(x).square().mean(),
    "mean of a dimension": lambda model, x: model.linear(x).square().mean(0).sum() / x.shape[1],
    "cross_entropy": lambda model, x: F.cross_entropy(
        model.linear(x), torch.zeros(len(x), dtype=torch.int64)
    ),
}


@pytest.mark.parametrize("mean", MEANS)
def test_means_in_fp16_are_finite_where_sums_are_not(mean):
    """Of 20,000 samples with losses of about 10."""
    model, loss_fn = loss_of(MEANS[mean])
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(4))
        model.linear.bias.zero_()
    x = torch.tensor([-4.0, 3.0, 6.0, 1.0]).half().expand(20_000, 4)
    check_forward(model.half(), loss_fn, x, [data_parallel], rtol=1e-2, atol=1e-2)


OTHER_CALLS = {
    "a linear layer with a vector": lambda model, x: F.linear(x, model.linear.weight[0]).mean(),
    "a view as another dtype": lambda model, x: (
        model.linear(x) * x.view(torch.int32).bitwise_and(3).sum(-1, keepdim=True)
    ),
    "a view as another dtype of equal size": lambda model, x: (
        model.linear(x) * x.view(torch.int64).bitwise_and(3)
    ),
    "repetitions by a tensor": lambda model, x: torch.repeat_interleave(
        model.linear(x), torch.tensor([1, 3, 2]), dim=1, output_size=6
    ),
}


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_calls_that_a_rule_does_not_fit_are_computed_by_all_ranks(call):
    """Rules are for names of operators, whose overloads and arguments may be others."""
    check_in_float64(OTHER_CALLS[call], (5, 3, 4))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("a linear layer with a vector", r"a part of it returns \['float32\[.*\], and not \["),
        ("repetitions by a tensor", "TypeError: "),
    ],
)
def test_a_call_that_a_rule_does_not_fit_says_why(call, says):
    model, loss_fn = loss_of(OTHER_CALLS[call])
    graph = export_loss(model, loss_fn, torch.randn(5, 3, 4)).graph
    (why,) = (node.misfit for node in graph.nodes.values() if node.misfit)
    assert re.match(says, why)


def test_dropout_that_keeps_everything_is_exported():
    model, loss_fn = loss_of(lambda model, x: model.dropout(x) * 2)
    assert export_loss(model.eval(), loss_fn, torch.randn(3, 4)).graph.output


def test_a_slice_of_all_of_a_tensor_is_no_call():
    model, loss_fn = loss_of(lambda model, x: x[: len(x)] * 2)
    graph = export_loss(model, loss_fn, torch.ones(4, 3)).graph
    assert not [node for node in graph.nodes.values() if "slice" in node.operator]


def test_losses_with_dimensions_are_refused():
    model, _ = loss_of(lambda model, x: model.linear(x))
    with pytest.raises(NotExportable, match="a float tensor of no dimensions"):
        export_loss(model, lambda model, x: model(x), torch.randn(3, 4))


IN_GRAPHS = {
    "not in place": (
        lambda model, x: model.linear(x).relu_().add_(1.0),
        "linear.default relu.default add.Tensor sum.default",
    ),
    "without tensors of which only the type matters": (
        lambda model, x: (model.linear(x) * x.new_ones(3, 4) * x.new_empty(4).fill_(2.0)).type_as(
            x.double()
        ),
        "linear.default ones.default mul.Tensor empty.memory_format fill.Scalar mul.Tensor "
        "to.dtype_layout sum.default",
    ),
}


@pytest.mark.parametrize("kind", IN_GRAPHS)
def test_operators_in_graphs(kind):
    forward, operators = IN_GRAPHS[kind]
    model, loss_fn = loss_of(forward)
    nodes = export_loss(model, loss_fn, torch.randn(3, 4)).graph.nodes.values()
    assert [node.operator for node in nodes if node.operator not in LEAVES] == [
        f"aten.{name}" for name in operators.split()
    ]


def test_tied_parameters_are_one_leaf():
    model, *_, found = exported("tied", 2)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(found.graph.parameters) == sorted(names)


def call_on(device):
    """The node of a call on a device, which this machine may not have."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.arange.default, (4,), {"device": device})
    node.meta["val"] = torch.arange(4, device="meta")
    return exported_graph._call(node, {})


def test_ranks_on_several_gpus_have_equal_graphs():
    first, second = (call_on(torch.device("cuda", index)) for index in range(2))
    assert repr(first) == repr(second)
    assert repr(first) != repr(call_on(torch.device("cpu")))


@pytest.mark.parametrize(("given", "used"), [("cuda", "cuda:1"), ("cpu", "cpu")])
def test_tensors_are_made_on_the_own_device_of_a_rank(monkeypatch, given, used):
    monkeypatch.setitem(local_execution._OWN, "made", lambda *devices, **named: (devices, named))
    device = torch.device(given)
    called = {"arguments": (device,), "keywords": {"device": device}}
    call = Node(name="node", operator="made", outputs=(), **called)
    own = torch.device(used)
    made = local_execution.run_local(call, {}.__getitem__, torch.device("cuda", 1))
    assert made == ((own,), {"device": own})
