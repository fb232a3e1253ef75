"""Modules on `meta` get the values, buffers and random state of a plain build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import poplar
from poplar.zero.weights import materialization
from poplar.zero.weights.materialization import (
    Initialization,
    check_buffers,
    check_initializers,
    move_to_meta,
    real_tensors,
)

CPU = torch.device("cpu")


class Tied(nn.Module):
    """The function initializes only the second of the two modules that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 3)
        self.between = nn.Linear(3, 3)
        self.last = nn.Linear(3, 5)
        self.last.weight = self.first.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 5),
    "nested": lambda: nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5), nn.PReLU())),
    "embedding": lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 1)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2)),
    "tied": Tied,
    "half": lambda: nn.Linear(3, 5, dtype=torch.bfloat16),
}


def drawn_again(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
    if isinstance(module, nn.LayerNorm):
        module.weight.add_(1)


def initialized(
    model: nn.Module, units: list[str], function: Callable[[nn.Module], None] | None
) -> dict[str, Tensor]:
    """The state of a model on `meta`, after its initialization."""
    check_initializers(model, units, function)
    names = {id(p): name for name, p in model.named_parameters()}
    values: dict[str, Tensor] = {}
    on_meta = {id(buffer) for buffer in model.buffers() if buffer.is_meta}

    def store(parameter: nn.Parameter, data: Tensor) -> None:
        values[names[id(parameter)]] = data.clone()

    with real_tensors(model, CPU):
        Initialization(model, units, function).run(store, torch.get_rng_state())
        check_buffers(model, on_meta)
    return {**values, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@pytest.mark.parametrize("function", [None, drawn_again])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("context", ["parameters", "all"])
def test_values_and_random_state_are_those_of_a_plain_build(
    kind: str, function: Callable[[nn.Module], None] | None, context: str
) -> None:
    torch.manual_seed(5)
    plain = MODELS[kind]()
    if function is not None:
        with torch.no_grad():
            plain.apply(function)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with poplar.parameters_on_meta() if context == "parameters" else torch.device("meta"):
        model = MODELS[kind]()
    units = ["0"] if kind == "attention" else []
    values = initialized(model, units, function)
    assert values.keys() == expected.keys()
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)


def test_ties_and_references_survive() -> None:
    with poplar.parameters_on_meta():
        model = Tied()
    parameter = model.first.weight
    parameter.note = "attributes stay"
    assert parameter.is_meta
    assert model.last.weight is parameter
    with real_tensors(model, CPU):
        pass
    assert not parameter.is_meta
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.untyped_storage().nbytes() == parameter.element_size()
    move_to_meta([parameter])
    assert parameter.is_meta
    assert model.last.weight is parameter is model.first.weight
    assert parameter.note == "attributes stay"


def test_parameters_that_a_graph_uses_cannot_move_to_meta() -> None:
    model = nn.Linear(3, 3)
    loss = model(torch.ones(1, 3)).square().sum()
    with pytest.raises(RuntimeError, match="still in use by a graph"):
        move_to_meta(list(model.parameters()))
    assert not any(p.is_meta for p in model.parameters())
    del loss
    move_to_meta(list(model.parameters()))
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("registered_before", [False, True])
def test_hooks_of_parameters_are_called_after_each_way_from_meta(registered_before: bool) -> None:
    """Engines that are built one after the other, as the profiler does, register theirs each time.

    Without them, gradients are complete, but are freed only at the end of a backward.
    """
    layer = nn.Linear(3, 2)
    called: list[str] = []
    weight = layer.weight
    if registered_before:
        weight.register_hook(lambda _: called.append("gradient, before"))
        weight.register_post_accumulate_grad_hook(lambda _: called.append("grad, before"))
    for _ in range(3):
        move_to_meta([weight])
        materialization._swap(weight, torch.ones(2, 3))
        handles = [
            weight.register_hook(lambda _: called.append("gradient")),
            weight.register_post_accumulate_grad_hook(lambda _: called.append("grad")),
        ]
        called.clear()
        layer(torch.ones(1, 3)).sum().backward()
        before = {"gradient, before", "grad, before"} if registered_before else set()
        assert sorted(called) == sorted({"gradient", "grad"} | before)
        for handle in handles:
            handle.remove()
