"""A backward through a graph from before an update raises where torch raises, and only there.

Except after a step that was not applied (`found_inf`, `on_nonfinite="skip"`): with torch, a graph
from before it may still be used. Here it raises, as the host does not know yet.

Each loop runs with an optimizer of torch in one process, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from poplar import HeteroZeroOptimizer

MODIFIED = "modified by an inplace operation"

Make = Callable[[nn.Module], Any]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def data(seed: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def backward_of_an_old_loss(make: Make) -> nn.Module:
    model = perceptron()
    optimizer = make(model)
    loss = model(data()).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return model


def generator_after_discriminator(make: Make) -> nn.Module:
    models = nn.ModuleDict({"generator": perceptron(), "discriminator": perceptron()})
    generator, discriminator = make(models["generator"]), make(models["discriminator"])
    fake = models["generator"](data())
    loss = models["discriminator"](fake).square().mean()
    (-models["discriminator"](fake.detach()).square().mean()).backward()
    discriminator.step()
    discriminator.zero_grad()
    loss.backward()
    generator.step()
    return models


def recurrent(make: Make, *, detaches: bool) -> nn.Module:
    """Backpropagation through time, truncated or not."""
    cell = nn.RNNCell(4, 4)
    optimizer, hidden = make(cell), torch.zeros(6, 4)
    for step in range(3):
        hidden = cell(data(step), hidden.detach() if detaches else hidden)
        hidden.square().mean().backward(retain_graph=not detaches)
        optimizer.step()
        optimizer.zero_grad()
    return cell


def whole_recurrence(make: Make) -> nn.Module:
    return recurrent(make, detaches=False)


def truncated_recurrence(make: Make) -> nn.Module:
    return recurrent(make, detaches=True)


def graph_of_another_part(make: Make) -> nn.Module:
    """The steps between the forward and the backward of a part update another part."""
    model = nn.ModuleList([perceptron(), perceptron()])
    optimizer = make(model)
    loss = model[1](data()).square().mean()
    for step in range(2):
        model[0](data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return model


def graphs_of_one_step(make: Make) -> nn.Module:
    """All forwards of a step, with a recomputed one, before its backwards."""
    model = perceptron()
    optimizer = make(model)
    for _ in range(3):
        losses = [
            model(data(1)).square().mean(),
            checkpoint(model, data(2), use_reentrant=False).square().mean(),
            functional.normalize(model(data(3))).sum(),
        ]
        for number, loss in enumerate(losses):
            is_last = number == len(losses) - 1
            accumulates = not is_last and isinstance(optimizer, HeteroZeroOptimizer)
            with optimizer.no_sync() if accumulates else nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def loss_of_its_own_step(make: Make) -> nn.Module:
    """A loss, and the values of the parameters, that are read after the update."""
    model = perceptron()
    optimizer = make(model)
    total = torch.zeros(())
    for step in range(3):
        loss = model(data(step)).square().mean()
        norm = sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss + norm  # its graph is never used
    return model


LOOPS = (
    *(backward_of_an_old_loss, generator_after_discriminator, whole_recurrence),
    *(truncated_recurrence, graph_of_another_part, graphs_of_one_step, loss_of_its_own_step),
)


def outcome(loop: Callable[[Make], nn.Module], make: Make) -> dict[str, Tensor] | None:
    """The parameters after the loop; None if it raises torch's error."""
    torch.manual_seed(0)
    try:
        model = loop(make)
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
        return None
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def with_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def outcomes(stage: int) -> list[dict[str, Tensor] | None]:
    """Of all loops, on ranks with the same samples."""
    made: list[HeteroZeroOptimizer] = []

    def make(model: nn.Module) -> HeteroZeroOptimizer:
        optimizer = HeteroZeroOptimizer(
            model,
            torch.optim.SGD,
            stage=stage,
            process_group=harness.group(),
            lr=0.1,
            momentum=0.9,
        )
        made.append(optimizer)
        return optimizer

    found = [outcome(loop, make) for loop in LOOPS]
    for optimizer in made:
        optimizer.zero_grad()
        optimizer.release()
    return found


def assert_equal_outcomes(
    found: Iterable[dict[str, Tensor] | None], expected: Iterable[dict[str, Tensor] | None]
) -> None:
    for loop, one, other in zip(LOOPS, found, expected, strict=True):
        assert (one is None) == (other is None), loop.__name__
        torch.testing.assert_close(one or {}, other or {}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_loops_raise_where_they_do_with_torch(ranks: Pool, stage: int) -> None:
    expected = [outcome(loop, with_torch) for loop in LOOPS]
    assert [result is None for result in expected] == [True] * 3 + [False] * 4
    for found in ranks.run(outcomes, stage, ranks=2):
        assert_equal_outcomes(found, expected)


def old_loss_of_unsharded_parameters(stage: int) -> str:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.1
    )
    with optimizer.full_parameters():
        old = model(data()).square().mean()
    optimizer.train_step(lambda m, x: m(x).square().mean(), data())
    with optimizer.full_parameters(), harness.catching() as caught:
        old.backward()
    return caught[0].message


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_of_unsharded_parameters_ends_with_the_update(ranks: Pool, stage: int) -> None:
    for message in ranks.run(old_loss_of_unsharded_parameters, stage, ranks=2):
        assert MODIFIED in message


def error_of_a_kept_loss() -> str:
    """The second step adds a loss of the first one."""
    torch.manual_seed(0)
    optimizer = HeteroZeroOptimizer(
        perceptron(), torch.optim.SGD, stage=3, process_group=harness.group(), lr=0.1
    )
    kept: list[Tensor] = []

    def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
        loss = module(x).square().mean()
        kept.append(module(x).sum())
        return loss if len(kept) == 1 else loss + kept[0]

    optimizer.train_step(loss_fn, data())
    with harness.catching() as caught:
        optimizer.train_step(loss_fn, data())
    return caught[0].message


def test_error_of_a_kept_loss_names_its_cause_at_stage_3(ranks: Pool) -> None:
    for message in ranks.run(error_of_a_kept_loss, ranks=2):
        assert "a graph from before an update: run a new forward after the step" in message
