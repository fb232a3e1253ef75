"""`zero_grad` between a forward and its backward, in loops without `micro_batches`, is as in torch.

At stage 3 the forward opens a pass of all ranks, which goes on. If no backward follows, the next
forward ends it, or the next method that all ranks call. Each loop runs with torch, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan, UnitPlan

RANKS = 2

Parameters = dict[str, Tensor]
Loop = Callable[[nn.Module, Any, Tensor], object]


class Model(nn.Module):
    """Two units, and a head in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def plan_of(stage: int, *persistent: str) -> Plan:
    units = tuple(UnitPlan(name, persistent=True) for name in persistent)
    plan = Plan(stage=stage, global_batch=8, micro_batches=((4,), (4,)), shares=(0.7, 0.3))
    return replace(plan, units=units)


def batch_of(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def take_step(model: nn.Module, optimizer: Any, x: Tensor, *, zeroes: int = 1) -> None:
    loss = loss_of(model, x)
    for _ in range(zeroes):
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Loops of torch


def zeroed_before_the_backward(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    take_step(model, optimizer, x)


def zeroed_twice(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    take_step(model, optimizer, x, zeroes=2)


def zeroed_in_the_model(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    loss = loss_of(model, x)
    model.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()


def zeroed_before_the_first_of_two_backwards(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    is_torch = isinstance(optimizer, torch.optim.SGD)
    loss = loss_of(model, x)
    optimizer.zero_grad()
    with contextlib.nullcontext() if is_torch else optimizer.no_sync():
        loss.backward()
    loss_of(model, x + 1).backward()
    optimizer.step()


def recomputed(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    loss = checkpoint(model, x, use_reentrant=False).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zeroed_without_a_backward(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    loss_of(model, x)
    optimizer.zero_grad()
    take_step(model, optimizer, x)


def evaluated_without_a_backward(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    for without_gradients in (torch.no_grad, torch.inference_mode):
        loss_of(model, x)
        optimizer.zero_grad()
        with without_gradients():
            for _ in range(2):
                model(x)
                model.blocks[0](x)
        take_step(model, optimizer, x)


def failed_in_the_forward(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """After a failure, forwards without gradients, too."""
    for takes_step in (True, False):
        with failing(model.blocks[1]), contextlib.suppress(ZeroDivisionError):
            loss_of(model, x)
        optimizer.zero_grad()
        if takes_step:
            take_step(model, optimizer, x)
        with torch.no_grad():
            model(x)
    take_step(model, optimizer, x)


def gradients_of_its_own(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    loss_of(model, x)
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, device=parameter.device)
    optimizer.step()


@contextlib.contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("in the forward of a block")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


LOOPS = [
    *(zeroed_before_the_backward, zeroed_twice, zeroed_in_the_model, recomputed),
    *(zeroed_before_the_first_of_two_backwards, zeroed_without_a_backward),
    *(evaluated_without_a_backward, failed_in_the_forward, gradients_of_its_own),
]


def train_with_torch(loop: Loop) -> Parameters:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loop(model, optimizer, batch_of(step))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(plan: Plan, loop: Loop) -> tuple[int, Parameters]:
    """Bytes that are unsharded after the steps, and the parameters."""
    model = Model().to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=plan,
        process_group=harness.group(),
        units=["blocks.0", "blocks.1"],
        lr=0.1,
        momentum=0.9,
    )
    for step in range(3):
        own = batch_of(step).chunk(RANKS)[harness.rank()]
        loop(model, optimizer, own.to(harness.device()))
    unsharded = optimizer.memory()["unsharded"] if plan.stage == 3 else 0
    with optimizer.full_parameters():
        return unsharded, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_trained(answers: list[tuple[int, Parameters]], expected: Parameters) -> None:
    for unsharded, parameters in answers:
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        assert unsharded == 0


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("stage", STAGES)
def test_loops_train_as_with_torch(ranks: Pool, stage: int, loop: Loop) -> None:
    assert_trained(ranks.run(train, plan_of(stage), loop, ranks=RANKS), train_with_torch(loop))


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_persistent_units_train_as_with_torch(ranks: Pool, loop: Loop) -> None:
    answers = ranks.run(train, plan_of(3, "root", "blocks.1"), loop, ranks=RANKS)
    assert_trained(answers, train_with_torch(loop))


# What may follow a forward without a backward, and zero_grad


def evaluation(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    optimizer.evaluate(loss_of, [x])


def all_values(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    with optimizer.full_parameters():
        pass


def another_plan(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    shares = (0.4, 0.6) if optimizer.plan.shares[0] > 0.5 else (0.7, 0.3)
    optimizer.apply_plan(replace(optimizer.plan, shares=shares))


def saved_state(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    optimizer.full_state_dict()


def whole_tensors(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    state = optimizer.state_dict()["state"]
    for part in (part for of_one in state.values() for part in of_one.values()):
        part.full_tensor()
    if not state:  # before the first step
        optimizer.full_state_dict()


def step_without_a_backward(_model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    with harness.catching() as caught:
        optimizer.step()
    assert "step() without a backward" in caught[0].message


def step_of_a_batch(model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    optimizer.train_step(loss_of, x)


def loop_over_a_batch(model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
    for micro_batch in optimizer.micro_batches(x):
        loss_of(model, micro_batch).backward()
    optimizer.step()


CALLS = [
    *(evaluation, all_values, another_plan, saved_state, whole_tensors),
    *(step_without_a_backward, step_of_a_batch, loop_over_a_batch),
]


class After:
    """A call after a forward without a backward, and a step, if the call takes none."""

    def __init__(self, call: Loop) -> None:
        self.call = call

    def __call__(self, model: nn.Module, optimizer: HeteroZeroOptimizer, x: Tensor) -> None:
        loss_of(model, x)
        optimizer.zero_grad()
        self.call(model, optimizer, x)
        assert optimizer.memory()["unsharded"] == 0
        if self.call not in (step_of_a_batch, loop_over_a_batch):
            take_step(model, optimizer, x)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_any_call_may_follow_a_forward_and_zero_grad(ranks: Pool, call: Loop) -> None:
    answers = ranks.run(train, plan_of(3), After(call), ranks=RANKS)
    assert_trained(answers, train_with_torch(take_step))


class Saving:
    """Saves the model after a forward without a backward."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _model: nn.Module, optimizer: HeteroZeroOptimizer, _x: Tensor) -> None:
        optimizer.save_model(self.path)


def test_a_save_may_follow_a_forward_and_zero_grad(ranks: Pool, tmp_path: Path) -> None:
    saving = After(Saving(tmp_path / "model.safetensors"))
    assert_trained(ranks.run(train, plan_of(3), saving, ranks=RANKS), train_with_torch(take_step))


def failed_on_one_rank(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """The other rank waits in its forward, until the next one of the rank that has failed."""
    fails = harness.rank() == 1
    with (
        failing(model.blocks[1]) if fails else contextlib.nullcontext(),
        contextlib.suppress(ZeroDivisionError),
    ):
        loss_of(model, x)
    optimizer.zero_grad()
    take_step(model, optimizer, x)


def test_a_rank_that_fails_in_its_forward_blocks_no_other(ranks: Pool) -> None:
    answers = ranks.run(train, plan_of(3), failed_on_one_rank, ranks=RANKS)
    assert_trained(answers, train_with_torch(take_step))


# A generator whose forward precedes the step of the discriminator


def train_adversarially(make: Callable[[nn.Module, int], Any], part: slice, stage: int) -> Any:
    """The order of PyTorch's DCGAN tutorial."""
    generator, discriminator = Model(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_discriminator = make(generator, stage), make(discriminator, min(stage, 2))
    for step in range(3):
        made = generator(batch_of(step)[part])
        of_discriminator.zero_grad()
        (-loss_of(discriminator, made.detach())).backward()
        of_discriminator.step()
        discriminator.requires_grad_(False)
        of_generator.zero_grad()
        loss_of(discriminator, made).backward()
        of_generator.step()
        discriminator.requires_grad_(True)
    with contextlib.ExitStack() as stack:
        if isinstance(of_generator, HeteroZeroOptimizer):
            stack.enter_context(of_generator.full_parameters())
        models = (generator, discriminator)
        return [p.detach().clone() for model in models for p in model.parameters()]


def train_adversarially_on_ranks(stage: int) -> list[Tensor]:
    def make(model: nn.Module, stage: int) -> HeteroZeroOptimizer:
        options = {"stage": stage, "process_group": harness.group(), "lr": 0.1}
        return HeteroZeroOptimizer(model, torch.optim.SGD, **options)

    first = 4 * harness.rank()
    return train_adversarially(make, slice(first, first + 4), stage)


@pytest.mark.parametrize("stage", STAGES)
def test_generator_forward_before_the_step_of_the_discriminator(ranks: Pool, stage: int) -> None:
    def make(model: nn.Module, stage: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    expected = train_adversarially(make, slice(0, 8), stage)
    for trained in ranks.run(train_adversarially_on_ranks, stage, ranks=RANKS):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
