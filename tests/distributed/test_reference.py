"""The reference of the tests agrees with DDP on equal ranks."""

from __future__ import annotations

import models
import pytest
import ranks as harness
import reference
import torch
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from torch.nn.parallel import DistributedDataParallel


def train_with_ddp(recipe: Recipe) -> dict[str, torch.Tensor]:
    model = models.build(recipe.spec).to(harness.device())
    groups = models.parameter_groups(recipe.spec, model) or model.parameters()
    optimizer = recipe.optimizer_class(groups, **dict(recipe.options))
    replicated = DistributedDataParallel(
        model, process_group=harness.group(), find_unused_parameters=recipe.spec.unused
    )
    for step in range(len(recipe.batches)):
        whole = recipe.batch(step)
        each = recipe.batches[step] // harness.size()
        mine = models.part(whole, harness.rank() * each, (harness.rank() + 1) * each)
        mine = {k: v.to(harness.device()) for k, v in mine.items()}
        models.mean_over_samples(replicated, mine).backward()
        if recipe.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(max_norm=0.1, spec=ModelSpec(tied=True, frozen=True, two_groups=True)),
        Recipe(
            optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)), spec=ModelSpec(norm="rms")
        ),
    ],
    ids=["plain", "everyday model, clipped", "sgd"],
)
def test_reference_agrees_with_ddp_on_equal_ranks(ranks: Pool, recipe: Recipe) -> None:
    expected = reference.train(recipe).parameters
    for parameters in ranks.run(train_with_ddp, recipe):
        for name, value in parameters.items():
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5 * largest, msg=name)
