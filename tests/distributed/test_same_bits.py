"""At one stage the same batches give the same bits, for any shares and in every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from training import STAGES, Run, assert_same, train_many

from poplar import Plan

SHARES = (
    (0.25, 0.25, 0.25, 0.25),
    (0.55, 0.25, 0.15, 0.05),
    (0.0, 0.0, 0.0, 1.0),
    (0.013, 0.329, 0.331, 0.327),
)
MICRO_BATCHES = ((1, 3), (1, 2), (2, 2), (0, 1))

RECIPES = {
    "plain": Recipe(batches=(12,) * 2),
    "clipped": Recipe(batches=(12,) * 2, max_norm=0.1),
    "clipped, tied, two groups, tokens": Recipe(
        batches=(12, 7),
        max_norm=0.1,
        loss="tokens",
        spec=ModelSpec(tied=True, unused=True, frozen=True, two_groups=True),
    ),
    "bf16, clipped": Recipe(
        batches=(12,) * 2, max_norm=0.1, spec=ModelSpec(dtype=torch.bfloat16, norm="rms")
    ),
    "sgd": Recipe(
        batches=(12,) * 2, optimizer="SGD", options=(("lr", 0.1), ("momentum", 0.9)), max_norm=0.1
    ),
}


def plan_with(shares: tuple[float, ...], stage: int) -> Plan:
    return Plan(stage=stage, global_batch=12, micro_batches=MICRO_BATCHES, shares=shares)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RECIPES)
def test_shares_do_not_change_the_bits(ranks: Pool, name: str, stage: int) -> None:
    recipe = RECIPES[name]
    dtype = recipe.spec.dtype
    engine = {} if dtype == torch.float32 else {"compute_dtype": dtype}
    runs = [Run(recipe, plan_with(shares, stage), engine=engine) for shares in SHARES]
    of_ranks = ranks.run(train_many, runs)
    first = of_ranks[0][0]
    assert any(value.isfinite().all() for value in first.parameters.values())
    for of_rank in of_ranks:
        for trajectory in of_rank:
            assert_same(trajectory.parameters, first.parameters)
            assert trajectory.losses == first.losses
            assert trajectory.norms == first.norms


@pytest.mark.parametrize("stage", STAGES)
def test_train_step_and_micro_batches_give_the_same_bits(ranks: Pool, stage: int) -> None:
    recipe = RECIPES["clipped, tied, two groups, tokens"]
    closed = Run(recipe, plan_with(SHARES[1], stage))
    trained = ranks.run(train_many, [closed, replace(closed, open_form=True)])
    assert_same(trained[0][0].parameters, trained[0][1].parameters)
