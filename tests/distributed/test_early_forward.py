"""At stages 0 to 2 the first forward of a rank does not wait for late ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import models
import pytest
import ranks as harness
import reference
import torch.distributed as dist
import training
from communicators import LateCommunicator
from ranks import Pool
from reference import Recipe
from torch import Tensor, nn
from training import Run

from poplar import Plan
from poplar.comm import Group
from poplar.zero import unit as units

RECIPE = Recipe(batches=(12, 12, 7))
LATE = 1


def train_with_one_late_rank(run: Run) -> dict[str, Tensor]:
    """One rank enters each step after all others have run their first forward."""
    model, optimizer = training.prepare(run)
    for step in range(len(run.recipe.batches)):
        arrived = [False]
        if harness.rank() == LATE:
            dist.barrier(group=harness.group())

        def loss(model: nn.Module, micro_batch: dict, arrived: list[bool] = arrived) -> Tensor:
            value = models.mean_over_samples(model, micro_batch)
            if harness.rank() != LATE and not arrived[0]:
                arrived[0] = True
                dist.barrier(group=harness.group())
            return value

        optimizer.train_step(loss, training.batch_of(run, step))
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "micro_batches", [((3,), (3,), (3,), (3,)), ((2, 2), (1, 1), (0, 2), (1, 3))]
)
def test_first_forward_does_not_wait_for_other_ranks(
    ranks: Pool, stage: int, micro_batches: tuple
) -> None:
    plan = Plan(
        stage=stage, global_batch=12, micro_batches=micro_batches, shares=(0.55, 0.25, 0.0, 0.2)
    )
    expected = reference.train(RECIPE).parameters
    for parameters in ranks.run(train_with_one_late_rank, Run(RECIPE, plan)):
        training.assert_close(parameters, expected)


def train_after_failed_backward(run: Run, late: bool) -> dict[str, Tensor]:
    """In the user's own loop a backward raises on all ranks; training continues without it."""
    if late:
        run = replace(
            run, engine={"communicator": LateCommunicator(Group.of(harness.group(), None))}
        )
    units.MAX_FLAT_BYTES, before = 1, units.MAX_FLAT_BYTES  # several concurrent reductions
    try:
        model, optimizer = training.prepare(run)
    finally:
        units.MAX_FLAT_BYTES = before
    loss = training.loss_of(run.recipe)

    def fail(_gradient: Tensor) -> None:
        raise ZeroDivisionError("in the middle of a backward")

    for step in range(len(run.recipe.batches)):
        if step == 1:
            handle = model.blocks[0].register_forward_hook(
                lambda _module, _inputs, output: output.register_hook(fail) and None
            )
            with contextlib.suppress(ZeroDivisionError):
                (10.0 * loss(model, training.batch_of(run, step))).backward()
            handle.remove()
            optimizer.zero_grad()
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_failed_backward_are_dropped(ranks: Pool, stage: int, late: bool) -> None:
    recipe = Recipe(batches=(12, 12, 12))
    plan = Plan(  # two passes: the first accumulates, the second reduces
        stage=stage, global_batch=12, micro_batches=((1, 2),) * 4, shares=(0.4, 0.3, 0.2, 0.1)
    )
    run = Run(recipe, plan, open_form=True)
    expected = reference.train(recipe).parameters
    for parameters in ranks.run(train_after_failed_backward, run, late):
        training.assert_close(parameters, expected)
