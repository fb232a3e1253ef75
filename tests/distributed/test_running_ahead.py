"""Where nothing is gathered, a rank's first forward does not wait for ranks that are late."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import models
import pytest
import ranks as harness
import reference
import torch.distributed as dist
import training
from ranks import Pool
from reference import Recipe
from torch import Tensor, nn
from training import Run
from watched import Late

from poplar import Plan
from poplar.comm import Group
from poplar.zero import unit as units

RECIPE = Recipe(batches=(12, 12, 7))
LATE = 1


def train_where_one_is_late(run: Run) -> dict[str, Tensor]:
    """It comes to each step when all others have run their first forward of it."""
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
def test_the_first_forward_runs_before_all_have_opened_the_step(
    ranks: Pool, stage: int, micro_batches: tuple
) -> None:
    plan = Plan(
        stage=stage, global_batch=12, micro_batches=micro_batches, shares=(0.55, 0.25, 0.0, 0.2)
    )
    expected = reference.train(RECIPE).parameters
    for parameters in ranks.run(train_where_one_is_late, Run(RECIPE, plan)):
        training.assert_close(parameters, expected)


def train_after_a_backward_that_raised(run: Run, late: bool) -> dict[str, Tensor]:
    """The user's own loop: a backward breaks off in the middle on all ranks, and is forgotten."""
    if late:
        run = replace(run, engine={"communicator": Late(Group.of(harness.group(), None))})
    units.MAX_FLAT_BYTES, before = 1, units.MAX_FLAT_BYTES  # several reductions are under way
    try:
        model, optimizer = training.prepare(run)
    finally:
        units.MAX_FLAT_BYTES = before
    loss = training.loss_of(run.recipe)

    def raise_it(_gradient: Tensor) -> None:
        raise ZeroDivisionError("in the middle of a backward")

    for step in range(len(run.recipe.batches)):
        if step == 1:
            handle = model.blocks[0].register_forward_hook(
                lambda _module, _inputs, output: output.register_hook(raise_it) and None
            )
            with contextlib.suppress(ZeroDivisionError):
                (10.0 * loss(model, training.batch_of(run, step))).backward()
            handle.remove()
            optimizer.zero_grad()
        training.take_step(run, model, optimizer, step)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_broken_backward_has_sent_reaches_no_later_step(
    ranks: Pool, stage: int, late: bool
) -> None:
    recipe = Recipe(batches=(12, 12, 12))
    plan = Plan(  # two passes: the first adds up what the second reduces
        stage=stage, global_batch=12, micro_batches=((1, 2),) * 4, shares=(0.4, 0.3, 0.2, 0.1)
    )
    run = Run(recipe, plan, open_form=True)
    expected = reference.train(recipe).parameters
    for parameters in ranks.run(train_after_a_backward_that_raised, run, late):
        training.assert_close(parameters, expected)
