"""Hugging Face models with `weight=poplar.tokens()` train as in one process, on unequal ranks."""

from __future__ import annotations

import pytest
import ranks as harness
import torch
import unequal_passes as training
from ranks import Pool
from unequal_passes import Job, assert_equal_losses

from poplar import HeteroZeroOptimizer, Plan


def train(job: Job) -> list[float]:
    """Losses of training with Poplar's own optimizer, on this rank."""
    model = training.build(job.model)
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=job.plan, process_group=harness.group(), lr=3e-3
    )
    losses = []
    for step in range(job.steps):
        batch = training.part_of(job, step)
        result = optimizer.train_step(training.loss_fn, batch, weight=job.weight)
        losses.append(float(result.loss))
    return losses


@pytest.mark.every_combination
@pytest.mark.parametrize(("model", "stage"), [("llama", 3), ("bert", 2), ("gpt2", 0)])
def test_losses_are_those_of_one_process(ranks: Pool, model: str, stage: int) -> None:
    shares = (0.5, 0.3, 0.2)
    micro_batches = ((3, 3), (1, 2), (0, 1))
    plan = Plan(stage=stage, global_batch=10, micro_batches=micro_batches, shares=shares)
    job = Job(model, plan, steps=20)
    assert_equal_losses(ranks.run(train, job, ranks=3), job)
