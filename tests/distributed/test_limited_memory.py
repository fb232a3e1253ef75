"""Training in processes whose memory the operating system limits: real failures of allocators."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

import limited_memory
import pytest
import ranks as harness
import torch
from ranks import one_off
from subset import choose
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory")

WIDTH = 64
LENGTH = 16384
"""A pass of one sample saves activations of 4 MiB per layer, 24 MiB in all."""
LAYERS = 6
LIMITED = 1
"""The rank with little memory."""
ROOM = 96 << 20
"""Bytes that it may still allocate: for one or two samples, not for five."""
STEPS = 3
GLOBAL_BATCH = 10
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    parameters: dict[str, Tensor]
    largest_batches: dict[int, int]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def samples(step: int, count: int, start: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count + start, LENGTH, WIDTH, generator=generator)[start:]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


Undisturbed = tuple[list[float], dict[str, Tensor]]
"""Losses and parameters."""


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """The reference: plain PyTorch in one process on the whole batch."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        loss = loss_of(model, samples(step, GLOBAL_BATCH, 0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train(plan: Plan, communicator: str) -> Trained:
    """Train; after the first step, one rank has little memory left."""
    # Otherwise the passes of the first step leave memory to those of the second.
    limited_memory.return_freed_memory()
    rank = harness.rank()
    model = build()
    optimizer = HeteroZeroOptimizer(
        *(model, torch.optim.AdamW),
        plan=plan,
        process_group=harness.group(),
        communicator=communicator,
        lr=LEARNING_RATE,
    )
    losses = []
    for step in range(STEPS):
        batch = samples(step, plan.samples(rank), plan.offset(rank))
        if step == 1 and rank == LIMITED:
            limited_memory.limit_to(ROOM)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(float(optimizer.train_step(loss_of, batch, max_norm=1.0).loss))
        del batch
    with optimizer.full_parameters():
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, parameters, optimizer.largest_batches)


CASES = [
    (0, "process_group"),
    (1, "shared_memory"),
    (2, "process_group"),
    (3, "process_group"),
    (3, "shared_memory"),
]


@pytest.mark.parametrize(("stage", "communicator"), choose(quick=CASES[1::2], full=CASES))
def test_training_goes_on_after_a_real_shortage(
    undisturbed: Undisturbed, stage: int, communicator: str
) -> None:
    plan = Plan(
        stage=stage, global_batch=GLOBAL_BATCH, micro_batches=((3, 1), (1, 5)), shares=(0.5, 0.5)
    )
    losses, parameters = undisturbed
    for outcome in one_off(2, train, plan, communicator):
        assert not isinstance(outcome, harness.Failure), outcome
        assert outcome.losses == pytest.approx(losses, rel=1e-5)
        assert outcome.largest_batches.keys() == {LIMITED}
        assert outcome.largest_batches[LIMITED] in (1, 2)
        for name, value in outcome.parameters.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)
