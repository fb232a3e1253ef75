"""What a graph of `torch.export` does not hold is an input, or is found before it is trained."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poplar.programmes.run.checked_export import CheckedExport
from poplar.values.errors import NotExportable

WIDTH, GLOBAL_BATCH = 4, 6
CPU = torch.device("cpu")


class Model(nn.Module):
    """Two layers, with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.calls, self.factor = between, 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.between(self.first(x).tanh()))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def batch(samples: int = 3) -> dict[str, Any]:
    torch.manual_seed(7)
    return {"x": torch.randn(samples, WIDTH), "y": torch.randn(samples, WIDTH)}


def squares(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def checked(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor] = squares, **values: Any
) -> CheckedExport:
    return CheckedExport(model, loss_fn, {**batch(), **values}, GLOBAL_BATCH)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: -gradient)
    return x


def takes_targets(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    targets = batch.pop("y")
    return F.mse_loss(model(batch["x"]), targets)


def test_a_loss_may_take_something_out_of_its_batch() -> None:
    exported = checked(Model(), takes_targets)
    exported.check(batch(GLOBAL_BATCH), 0)


def hooked_node(x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda gradients: (-gradients[0],))
    return x


def with_module_hook() -> nn.Module:
    model = Model()
    model.first.register_full_backward_hook(lambda module, grads, _: (-grads[0],))
    return model


def hooking(model: Any, batch: dict[str, Any]) -> Tensor:
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return squares(model, batch)


def with_parameter_hook() -> nn.Module:
    model = Model()
    model.first.weight.register_hook(lambda gradient: -gradient)
    return model


def with_accumulation_hook() -> nn.Module:
    model = Model()
    model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def flipping() -> Callable[[Tensor], Tensor]:
    """Every other call leaves the tensor as it is; no generator of random numbers is known."""
    calls = iter(range(1000))
    return lambda x: x if next(calls) % 2 else 2 * x


LOST: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], str]] = {
    "function": (lambda: Model(Reversed.apply), squares, "autograd.Function Reversed"),
    "tensor hook": (lambda: Model(hooked), squares, "calls register_hook()"),
    "accumulation hook in the forward": (
        Model,
        hooking,
        "calls register_post_accumulate_grad_hook()",
    ),
    "module hook": (with_module_hook, squares, "a module has a backward hook"),
    "parameter hook": (with_parameter_hook, squares, "the parameter 'first.weight' has a hook"),
    "accumulation hook": (
        with_accumulation_hook,
        squares,
        "the parameter 'first.weight' has a hook",
    ),
    "hook on a node": (
        lambda: Model(hooked_node),
        squares,
        "the gradient of 'first.",
    ),
    "random": (lambda: Model(lambda x: x * random.random()), squares, "random numbers of Python"),
    "choice": (lambda: Model(flipping()), squares, "a batch has the loss"),
    "counter": (Model, lambda m, b: squares(m, b) * m.calls, "a batch has the loss"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOST)
def test_what_a_graph_does_not_hold_is_a_reason_for_no_programme(kind: str) -> None:
    new, loss_fn, reason = LOST[kind]
    with pytest.raises(NotExportable) as raised:
        checked(new(), loss_fn)
    assert reason in str(raised.value)


class Masked(Model):
    """Keeps the mask that its first forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask = torch.ones(WIDTH, WIDTH).tril()
        return super().forward(x @ self.mask)


def with_cached_function() -> nn.Module:
    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    return Model(lambda x: x @ mask(WIDTH))


@pytest.mark.parametrize("new", [Masked, with_cached_function])
def test_tensors_that_the_first_forward_keeps_have_values(new: Callable[[], nn.Module]) -> None:
    """An export makes tensors without values, which later forwards could not read."""
    model = new()
    checked(model)
    squares(model, batch()).backward()


def needing_gradients(model: Any, given: dict[str, Any]) -> Tensor:
    x = model(given["x"])
    x.retain_grad()  # raises where gradients are disabled
    return F.mse_loss(x, given["y"])


def test_forwards_that_need_gradients_are_exported() -> None:
    checked(Model(), needing_gradients)


def scaled(model: Any, batch: dict[str, Any]) -> Tensor:
    return squares(model, batch) * model.factor


def reversal(model: Any, batch: dict[str, Any]) -> Tensor:
    """The loss does not depend on the factor, but its gradient does."""
    h = model.first(batch["x"])
    h = h.detach() * (1.0 + model.factor) - model.factor * h
    return F.mse_loss(model.second(h), batch["y"])


@pytest.mark.parametrize("loss_fn", [scaled, reversal])
def test_numbers_of_python_that_change_in_training_are_found(
    loss_fn: Callable[[Any, Any], Tensor],
) -> None:
    model = Model()
    export = checked(model, loss_fn)
    export.check(batch(1), step=1)
    model.factor = 1.01
    with pytest.raises(NotExportable, match=r"a batch has the loss|the gradient of 'first"):
        export.check(batch(1), step=4)


def test_comparisons_are_due_after_powers_of_two_and_every_256_steps() -> None:
    due = [step for step in range(1000) if CheckedExport.is_due(step)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]


def test_numbers_of_the_batch_are_inputs() -> None:
    export = checked(
        Model(), lambda m, b: squares(m, b) * b["beta"] + b["epoch"], beta=0.5, epoch=3
    )
    assert {"['beta']", "['epoch']"} <= set(export.exported.graph.batch)
    for beta in (1.0, 2.5):
        export.check({**batch(), "beta": beta, "epoch": 7}, step=1)
    with pytest.raises(ValueError, match=r"0.5 at \['epoch'\], but the example batch had a int64"):
        export.exported.tensors({**batch(), "beta": 1.0, "epoch": 0.5}, CPU)


def test_numbers_that_a_graph_keeps_must_be_those_of_the_example() -> None:
    def loss_fn(model: nn.Module, given: dict[str, Any]) -> Tensor:
        return squares(model, given) if given["kind"] == "mse" else model(given["x"]).sum()

    def first_columns(model: nn.Module, given: dict[str, Any]) -> Tensor:
        return model(given["x"])[:, : list(range(10))[given["count"]]].mean()

    for name, used, other, used_by in (
        ("kind", "mse", "sum", loss_fn),
        ("count", 2, 3, first_columns),
    ):
        exported = checked(Model(), used_by, **{name: used}).exported
        exported.tensors({**batch(), name: used}, CPU)
        with pytest.raises(ValueError, match=f"the batch has {other!r} at .*'{name}'"):
            exported.tensors({**batch(), name: other}, CPU)


def test_names_of_samples_may_be_others() -> None:
    exported = checked(Model(), names=["a", "b", "c"]).exported
    exported.tensors({**batch(), "names": ["d", "e", "f"]}, CPU)


def without_gradient(model: Any, given: dict[str, Any]) -> Tensor:
    """Regions in regions; values that pass through one keep their gradients."""
    x = model.first(given["x"])
    with torch.no_grad():
        a = model.first(x).relu()
        same = x
        with torch.enable_grad():
            b = model.second(same) * 2
        c = b.exp() + model.second(a)
        with torch.autocast("cpu", torch.bfloat16):
            d = model.second(x)
    return (a * b * c * same * d.float()).mean() + squares(model, given)


def with_autocast(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = model(given["x"])
        with torch.autocast("cpu", enabled=False):
            x = model.first(x.float())
        with torch.no_grad():
            scale = model.second(x)
    return (F.mse_loss(x.float(), given["y"]) + (scale.float() * x).mean()) / 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x[:, None])[0])[0][:, 0]


@pytest.mark.parametrize(
    ("new", "loss_fn"), [(Model, without_gradient), (Model, with_autocast), (Recurrent, squares)]
)
def test_regions_and_recurrent_layers_are_in_the_graph(
    new: Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Tensor]
) -> None:
    assert checked(new(), loss_fn).exported.graph.output


def test_recurrent_layers_with_dropout_draw_random_numbers() -> None:
    layer = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
    with pytest.raises(NotExportable, match=r"aten.lstm.input draws random numbers"):
        checked(layer, lambda m, b: m(b["x"])[0].mean())
    checked(layer.eval(), lambda m, b: m(b["x"])[0].mean())
