"""Losses that run `autograd.grad` without a graph: only the backward of the loss counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import ranks as harness
import torch
import training
from ranks import Failure, Pool
from torch import Tensor, nn
from torch.func import functional_call
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.passes.collective_order import Slot, SlotKind

PASSES = ((3, 1), (2, 0))
"""Rank 1 has no samples in its second pass."""
STEPS = 3
UNITS = ["blocks.0", "blocks.1", "blocks.2"]
FACTORED = ("blocks.0.0", "blocks.2.0", "head")


class Blocks(nn.Module):
    """Three units between two layers of the root; returns what the first one does, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        blocks = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = x = self.blocks[0](self.first(x))
        for block in self.blocks[1:]:
            x = block(x)
        return features, self.head(x)


Loss = Callable[[nn.Module, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1].square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(plain(model, x), x)
    return plain(model, (x + 0.3 * gradient.sign()).detach())


def adversarial_by_backward(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    plain(model, x).backward(inputs=[x])
    return plain(model, (x + 0.3 * x.grad.sign()).detach())


def of_shared_features(model: nn.Module, x: Tensor) -> Tensor:
    features, y = model(x)
    value = y.square().mean()
    (gradient,) = torch.autograd.grad(value, features, retain_graph=True)
    return value + (features * gradient.sign()).mean()


def of_parameters(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients are only looked at."""
    value = plain(model, x)
    torch.autograd.grad(value, [*model.parameters()], retain_graph=True)
    return value


def at_another_point_of_the_graph(model: nn.Module, x: Tensor) -> Tensor:
    """The loss has a part in the graph of the first forward."""
    x = x.clone().requires_grad_()
    value = plain(model, x)
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
    return value + plain(model, (x + 0.3 * gradient.sign()).detach())


LOSSES: tuple[Loss, ...] = (
    *(adversarial, adversarial_by_backward, of_shared_features, of_parameters),
    at_another_point_of_the_graph,
)


def batch_of(step: int, start: int, stop: int) -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(step))[start:stop]


def build(model: nn.Module, stage: int, factored: tuple[str, ...]) -> HeteroZeroOptimizer:
    plan = Plan(
        stage=stage, global_batch=6, micro_batches=PASSES, shares=(0.6, 0.4), factored=factored
    )
    return HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), units=UNITS, lr=0.3
    )


def own_batch(step: int) -> Tensor:
    return batch_of(step, 0, 4) if harness.rank() == 0 else batch_of(step, 4, 6)


def train(
    stage: int, losses: list[Loss], loop: str, factored: tuple[str, ...]
) -> list[dict[str, Tensor]]:
    found = []
    for loss in losses:
        harness.note(loss.__name__)
        model = Blocks()
        optimizer = build(model, stage, factored)
        for step in range(STEPS):
            x = own_batch(step)
            if loop == "train_step":
                optimizer.train_step(loss, x)
                continue
            for micro_batch in optimizer.micro_batches(x):
                loss(model, micro_batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(training.whole_parameters(model, optimizer))
        optimizer.release()
    return found


def train_alone(loss: Loss) -> dict[str, Tensor]:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        value = loss(model, batch_of(step, 0, 6))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loop", ["train_step", "micro_batches"])
@pytest.mark.parametrize("factored", [(), FACTORED])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_inputs_in_a_loss_leave_none(
    ranks: Pool, stage: int, loop: str, factored: tuple[str, ...]
) -> None:
    losses = [each for each in LOSSES if not (factored and each is of_parameters)]
    for trained in ranks.run(train, stage, losses, loop, factored, ranks=2):
        for loss, parameters in zip(losses, trained, strict=True):
            training.assert_close(parameters, train_alone(loss), loss.__name__)


def look_between_steps(stage: int) -> dict[str, Tensor]:
    """A gradient with respect to the input, as of a saliency map, before each backward."""
    model = Blocks()
    plan = replace(Plan.even(2, 6, 3, stage), factored=FACTORED)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.3
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.ones(2, 6, requires_grad=True)
        torch.autograd.grad(plain(model, x), x)
        first = 3 * harness.rank()
        plain(model, batch_of(step, first, first + 3)).backward()
        optimizer.step()
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_inputs_between_steps_leave_none(ranks: Pool, stage: int) -> None:
    for parameters in ranks.run(look_between_steps, stage, ranks=2):
        training.assert_close(parameters, train_alone(plain))


def issued_slots() -> list[Slot]:
    """The order of later training passes with the adversarial loss."""
    model = Blocks()
    optimizer = build(model, 3, ())
    optimizer.train_step(adversarial, own_batch(0))
    orders = optimizer._training.engine.scheduler._recorded_orders
    return next(list(order) for order in orders.values())


def test_each_forward_and_backward_unshards_its_units_once(ranks: Pool) -> None:
    """Units 1 to 3 are the blocks. A turn of direction keeps the unit that is unsharded."""
    for slots in ranks.run(issued_slots, ranks=2):
        units = [slot.index for slot in slots if slot.kind is not SlotKind.REDUCE and slot.index]
        assert units == [1, 2, 3, 2, 1, 2, 3, 2, 1]
        first_reduction = next(n for n, s in enumerate(slots) if s.kind is SlotKind.REDUCE)
        assert len({slot.index for slot in slots[first_reduction:]}) > 1
        assert sum(slot.kind is not SlotKind.REDUCE for slot in slots[:first_reduction]) >= 8


def begin_later() -> list[Failure]:
    """From the second step on, the loss runs an inner gradient."""
    model = Blocks()
    optimizer = build(model, 3, ())
    optimizer.train_step(plain, own_batch(0))
    with harness.catching() as caught:
        optimizer.train_step(adversarial, own_batch(1))
    optimizer.train_step(plain, own_batch(1))
    return caught


def test_inner_gradients_that_the_first_pass_did_not_have_are_named(ranks: Pool) -> None:
    for failures in ranks.run(begin_later, ranks=2):
        training.assert_raised(failures, "autograd.grad", "use stage 2")
        assert failures


def masked(model: nn.Module, x: Tensor) -> Tensor:
    values = {name: p * (torch.arange(p.numel()) % 2).view(p.shape) for name, p in weights(model)}
    return functional_call(model, values, (x,))[1].square().mean()


def weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2]


def use_masks(stage: int) -> list[Failure]:
    model = Blocks()
    optimizer = build(model, stage, FACTORED)
    with harness.catching() as caught:
        optimizer.train_step(masked, own_batch(0))
    optimizer.train_step(plain, own_batch(0))
    return caught


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masked_weights_of_factored_layers_raise(ranks: Pool, stage: int) -> None:
    """Their gradients are not the product of rows."""
    for failures in ranks.run(use_masks, stage, ranks=2):
        training.assert_raised(failures, "weight got a gradient of its own")
        assert failures


def test_plans_without_factors_train_masked_weights(ranks: Pool) -> None:
    for (parameters,) in ranks.run(train, 1, [masked], "train_step", (), ranks=2):
        training.assert_close(parameters, train_alone(masked))
