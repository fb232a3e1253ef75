"""Optimizer state in host memory changes no bit of the training, at any stage.

Ranks of these tests have no device, so host memory is the memory that they have; the engine does
the same as on devices.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from test_nonfinite_gradients import take_poisoned_step
from torch import Tensor
from training import STAGES, Run, assert_exact, assert_same, train_many, uneven

import poplar
from poplar import HeteroZeroOptimizer

UNITS = {"units": ["blocks.0", "blocks.1", "blocks.2"]}
PARTS = (0.0, 0.3, 1.0, 1.0)
"""Rank 2 owns nothing."""


MOMENTUM = (("lr", 0.1), ("momentum", 0.9))
RECIPES = {
    "clipping": Recipe(max_norm=0.1, batches=(12, 12)),
    "momentum": Recipe(optimizer="SGD", options=MOMENTUM, batches=(12, 12)),
    "a plain class": Recipe(
        optimizer="RMSprop", options=(("lr", 1e-3), ("eps", 1e-3)), batches=(12, 12)
    ),
    "unused parameters, two groups": Recipe(
        spec=ModelSpec(unused=True, two_groups=True), batches=(12, 12)
    ),
}


def has_same_bits(recipe: Recipe) -> bool:
    """Whether the update has the same bits on the host: AdamW also beside a device."""
    return recipe.optimizer == "AdamW" or not torch.cuda.is_available()


@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_exact_and_host_state_changes_no_bit(ranks: Pool, stage: int) -> None:
    for name, recipe in RECIPES.items():
        plans = [uneven(stage), uneven(stage, host_state=PARTS)]
        trained = ranks.run(train_many, [Run(recipe, plan, engine=UNITS) for plan in plans])
        assert_exact([by_run[1] for by_run in trained], recipe, name)
        for plain, hosted in trained if has_same_bits(recipe) else ():
            assert_same(hosted.parameters, plain.parameters)
            assert (hosted.losses, hosted.norms) == (plain.losses, plain.norms)


def train(optimizer: HeteroZeroOptimizer, run: Run, first: int, stop: int) -> None:
    for step in range(first, stop):
        training.take_step(run, optimizer._training.engine.model, optimizer, step)


def start(stage: int, dtype: torch.dtype, *parts: float) -> tuple[HeteroZeroOptimizer, Run]:
    recipe = Recipe(spec=ModelSpec(dtype=dtype), batches=(12,) * 4)
    run = Run(recipe, uneven(stage, host_state=parts), engine=UNITS)
    return training.prepare(run)[1], run


def parameters_of(optimizer: HeteroZeroOptimizer) -> dict[str, Tensor]:
    return training.whole_parameters(optimizer._training.engine.model, optimizer)


def states_of(optimizer: HeteroZeroOptimizer) -> Any:
    return (optimizer.full_state_dict(to=0) or {}).get("state")


def move(stage: int, dtype: torch.dtype, folder: str) -> dict[str, list[Any]]:
    """Parameters and whole states of four steps with no host state; with host state that comes and
    goes and moves to other ranks; and with checkpoints between other parts."""
    found: dict[str, list[Any]] = {}
    plain, run = start(stage, dtype)
    train(plain, run, 0, 4)
    found["plain"] = [parameters_of(plain), states_of(plain)]

    changed, run = start(stage, dtype, *PARTS)
    train(changed, run, 0, 1)
    changed.apply_plan(replace(run.plan, host_state=(1.0, 0.0, 0.0, 0.0)))
    train(changed, run, 1, 2)
    others = replace(run.plan, host_state=(0.0, 0.5, 1.0, 0.0), shares=(0.1, 0.2, 0.4, 0.3))
    changed.apply_plan(others)
    train(changed, run, 2, 3)
    changed.apply_plan(replace(run.plan, host_state=()))
    train(changed, run, 3, 4)
    found["changed"] = [parameters_of(changed), states_of(changed)]

    saved, run = start(stage, dtype, *PARTS)
    train(saved, run, 0, 2)
    poplar.save_checkpoint(folder, saved)
    loaded, run = start(stage, dtype, 0.6, 0.0, 0.0, 0.6)
    poplar.load_checkpoint(folder, loaded)
    train(loaded, run, 2, 4)
    found["loaded"] = [parameters_of(loaded), states_of(loaded)]
    return found


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, torch.float32),
        (0, torch.bfloat16),
        (1, torch.bfloat16),
        (2, torch.float32),
        (3, torch.bfloat16),
    ],
)
def test_state_moves_between_device_and_host(
    ranks: Pool, stage: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    for found in ranks.run(move, stage, dtype, str(tmp_path / "saved")):
        for case in ("changed", "loaded"):
            for own, plain in zip(found[case], found["plain"], strict=True):
                torch.testing.assert_close(own, plain, rtol=0, atol=0)


def hold(parts: tuple[float, ...]) -> tuple[dict[str, int], list[int]]:
    optimizer, run = start(1, torch.bfloat16, *parts)
    train(optimizer, run, 0, 1)
    rank = harness.rank()
    sizes = [flat.layout.size(rank) for flat in optimizer._training.engine.trained]
    return optimizer.memory(), sizes


def test_memory_tells_what_is_on_the_host(ranks: Pool) -> None:
    for part, (held, sizes) in zip(PARTS, ranks.run(hold, PARTS), strict=True):
        hosted, total = 0, sum(sizes)
        for size in sizes:
            if hosted < part * total:
                hosted += size
        counters = held["host"] + held["masters"] + held["optimizer"] - 12 * total
        assert 0 <= counters <= 4 * len(sizes)
        assert 0 <= held["host"] - 12 * hosted <= counters


def skip(runs: Sequence[Run]) -> list[dict[str, Tensor]]:
    """Parameters after three steps, of which the second one has a NaN and is skipped."""
    found = []
    for run in runs:
        model, optimizer = training.prepare(run)
        for step in range(3):
            if step == 1:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    take_poisoned_step(run, optimizer, math.nan)
            else:
                training.take_step(run, model, optimizer, step)
        found.append(training.whole_parameters(model, optimizer))
    return found


def test_a_skipped_step_does_not_count_on_the_host(ranks: Pool) -> None:
    engine = {**UNITS, "on_nonfinite": "skip"}
    plans = [uneven(2), uneven(2, host_state=PARTS)]
    for recipe in filter(has_same_bits, (RECIPES["clipping"], RECIPES["momentum"])):
        recipe = replace(recipe, batches=(12,) * 3)
        runs = [Run(recipe, plan, engine=engine) for plan in plans]
        for plain, hosted in ranks.run(skip, runs):
            assert_same(hosted, plain)
