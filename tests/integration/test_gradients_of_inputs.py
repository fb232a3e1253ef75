"""Losses with gradients of inputs, as forces and saliency, in DDP and FSDP2 with unequal passes."""

from __future__ import annotations

import ranks as harness
import torch
import unequal_passes as training
from ranks import Pool
from torch import Tensor, nn

from poplar.values.plan import Plan

SAMPLES, STEPS = 8, 3
OWN_NUMBERS = ((3, 2), (2,), (1,))
EQUAL_NUMBERS = ((3, 2), (2, 0), (1, 0))
STAGES = {0: OWN_NUMBERS, 1: OWN_NUMBERS, 2: EQUAL_NUMBERS, 3: EQUAL_NUMBERS}


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, positions: Tensor) -> Tensor:
        for block in self.blocks:
            positions = nn.functional.silu(block(positions))
        return self.head(positions)


def forces(model: nn.Module, x: Tensor) -> Tensor:
    """A backward through the gradient."""
    positions = x.clone().requires_grad_()
    energy = model(positions)
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return (energy - x.sum(1, keepdim=True)).square().mean() + (gradient - x).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """A second forward, of what the gradient has changed."""
    attacked = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(attacked).square().sum(), attacked)
    return (model(x + 0.1 * gradient.sign()) - x.sum(1, keepdim=True)).square().mean()


LOSSES = (forces, adversarial)


def plan_of(stage: int) -> Plan:
    shares = (1 / 3,) * 3
    return Plan(stage=stage, global_batch=SAMPLES, micro_batches=STAGES[stage], shares=shares)


def model_and_batches() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Energy(), [torch.randn(SAMPLES, 6) for _ in range(STEPS)]


def train_in_engines() -> list[list[float]]:
    found = []
    for stage in STAGES:
        for loss_fn in LOSSES:
            job = training.Job("", plan_of(stage))
            harness.note(f"{loss_fn.__name__} at stage {stage}")
            model, batches = model_and_batches()
            with harness.separate_group() as group:
                found.append(train(job, training.wrap(job, model, group), batches, loss_fn))
    return found


def train(job: training.Job, model: nn.Module, batches: list[Tensor], loss_fn) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = job.engine.UnequalPasses(model, job.plan)
    sizes = [job.plan.samples(rank) for rank in range(3)]
    losses = []
    for batch in batches:
        for part in passes(batch.split(sizes)[harness.rank()]):
            passes.backward(loss_fn(model, part))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(passes.global_loss()))
    return losses


def train_alone(loss_fn) -> list[float]:
    model, batches = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_with_gradients_of_inputs_are_those_of_one_process(ranks: Pool) -> None:
    expected = [train_alone(loss_fn) for loss_fn in LOSSES] * len(STAGES)
    for found in ranks.run(train_in_engines, ranks=3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
