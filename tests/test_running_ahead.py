"""Where nothing is gathered, a rank's first forward does not wait for ranks that are late."""

from __future__ import annotations

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

from poplar import Plan

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
