"""Units that are recomputed on some ranks change no bit of the training, at any stage."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import models
import pytest
import ranks as harness
import torch
import training
from models import ModelSpec
from ranks import Pool
from reference import Recipe
from subset import choose
from torch import Tensor, nn
from training import STAGES, Run, assert_exact, assert_raised, assert_same, train_many

from poplar import HeteroZeroOptimizer, Plan, UnitPlan

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
UNMERGED = {"units": list(BLOCKS)}
MERGED = "blocks.0..blocks.2"
"""The default unit at stage 3: the blocks of the test model are small."""
RECOMPUTED = {"blocks.0": (1, 3), "blocks.1": (3,)}
"""Rank 1 recomputes one unit, rank 3 two, ranks 0 and 2 none."""


def plan_of(stage: int, recomputed: dict[str, tuple[int, ...]], *persistent: str) -> Plan:
    names = dict.fromkeys((*recomputed, *persistent))
    units = (
        UnitPlan(name, persistent=name in persistent, recomputed_on=recomputed.get(name, ()))
        for name in names
    )
    return training.uneven(stage, units=tuple(units))


CASES: dict[str, tuple[Recipe, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "some units": (Recipe(max_norm=0.1, batches=(12, 12)), UNMERGED, RECOMPUTED),
    "a merged unit": (Recipe(batches=(12, 12)), {}, {MERGED: (0, 3)}),
    "a model that uses checkpointing": (
        Recipe(spec=ModelSpec(checkpointing=True), batches=(12, 12)),
        UNMERGED,
        RECOMPUTED,
    ),
    "a unit that is entered several times": (
        Recipe(spec=ModelSpec(kind="albert"), batches=(12, 12)),
        {"units": ["blocks.0"]},
        {"blocks.0": (1, 3)},
    ),
    "frozen, tied, unused, two groups": (
        Recipe(
            spec=ModelSpec(frozen=True, tied=True, unused=True, two_groups=True), batches=(12, 12)
        ),
        UNMERGED,
        RECOMPUTED,
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_exact_and_recomputation_changes_no_bit(
    ranks: Pool, case: str, stage: int
) -> None:
    recipe, engine, recomputed = CASES[case]
    runs = [Run(recipe, plan_of(stage, each), engine=engine) for each in ({}, recomputed)]
    trained = ranks.run(train_many, runs)
    assert_exact([by_run[1] for by_run in trained], recipe, case)
    for plain, recomputing in trained:
        assert_same(recomputing.parameters, plain.parameters)
        assert (recomputing.losses, recomputing.norms) == (plain.losses, plain.norms)


def test_persistent_units_may_be_recomputed(ranks: Pool) -> None:
    recipe = Recipe(batches=(12, 12))
    plans = [plan_of(3, {}, "root", "blocks.1"), plan_of(3, RECOMPUTED, "root", "blocks.1")]
    for plain, recomputing in ranks.run(
        train_many, [Run(recipe, plan, engine=UNMERGED) for plan in plans]
    ):
        assert_same(recomputing.parameters, plain.parameters)


def test_compiled_blocks_may_be_recomputed(ranks: Pool) -> None:
    recipe = Recipe(spec=ModelSpec(compiled="aot_eager"), batches=(12,))
    for stage in choose(quick=(3,), full=(0, 3)):
        runs = [Run(recipe, plan_of(stage, each), engine=UNMERGED) for each in ({}, RECOMPUTED)]
        for plain, recomputing in ranks.run(train_many, runs):
            assert_same(recomputing.parameters, plain.parameters)


# What runs again


def forwards(model: nn.Module) -> Counter[str]:
    """Counts the forwards of the first layer of every block from now on."""
    found: Counter[str] = Counter()
    for name, block in zip(BLOCKS, model.blocks, strict=True):
        block.norm1.register_forward_hook(lambda *_, name=name: found.update([name]))
    return found


def count_forwards(plans: Sequence[Plan]) -> list[dict[str, int]]:
    """Forwards of each block in a step of each plan, which follow each other by `apply_plan`; then
    in an evaluation, in a copy of the model, and after `release`."""
    run = Run(Recipe(batches=(12,) * len(plans)), plans[0], engine=UNMERGED)
    model, optimizer = training.prepare(run)
    loss, found, counts = training.loss_of(run.recipe), forwards(model), []
    names = [name for name, _ in model.named_modules()]

    def finish() -> None:
        counts.append(dict(found))
        found.clear()

    for step, plan in enumerate(plans):
        if step:
            optimizer.apply_plan(plan)
        training.take_step(run, model, optimizer, step)
        finish()
    assert [name for name, _ in model.named_modules()] == names
    optimizer.evaluate(loss, [training.on_device(models.data(1, seed=0))])
    finish()
    with optimizer.full_parameters():
        clone = copy.deepcopy(model)
    loss(clone, training.on_device(models.data(1, seed=0))).backward()
    finish()
    optimizer.release()
    assert not any("forward" in vars(block) for block in model.blocks)
    loss(model, training.on_device(models.data(1, seed=0))).backward()
    finish()
    return counts


@pytest.mark.parametrize("stage", [1, 3])
def test_only_the_ranks_and_units_that_the_plan_names_run_again(ranks: Pool, stage: int) -> None:
    other = {"blocks.1": (1,), "blocks.2": (0, 1, 2, 3)}
    plans = [plan_of(stage, RECOMPUTED), plan_of(stage, other), plan_of(stage, {})]
    for rank, counts in enumerate(ranks.run(count_forwards, plans)):
        passes = sum(size > 0 for size in training.TWO_PASSES[rank])
        for recomputed, count in zip((RECOMPUTED, other, {}), counts, strict=False):
            assert count == {
                name: passes * (2 if rank in recomputed.get(name, ()) else 1) for name in BLOCKS
            }
        assert counts[3:] == [dict.fromkeys(BLOCKS, 1)] * 3


class Noisy(nn.Module):
    """A block with random numbers, running statistics, and tensors as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, gate: dict[str, Tensor], flag: bool = False) -> Tensor:
        assert flag
        return x + gate["by"] * self.drop(torch.tanh(self.norm(self.linear(x))))


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, gate={"by": x.sigmoid()}, flag=True)
        return x.square().mean()


def train_noise(stage: int, recomputed: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(harness.rank())
    model = Noise().to(harness.device())
    plan = Plan.manual("3,4", stage=stage, passes=2)
    units = plan_of(stage, recomputed).units
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=replace(plan, units=units),
        process_group=harness.group(),
        units=list(BLOCKS),
        compute_dtype=torch.float32,
        allow_forward_state=True,
        lr=0.1,
    )
    for _ in range(2):
        batch = torch.randn(plan.samples(harness.rank()), 8).to(harness.device())
        optimizer.train_step(lambda model, x: model(x), batch)
    buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return {**training.whole_parameters(model, optimizer), **buffers}


@pytest.mark.parametrize("stage", [0, 3])
def test_random_numbers_are_the_same_and_statistics_count_once(ranks: Pool, stage: int) -> None:
    plain = ranks.run(train_noise, stage, {}, ranks=2)
    recomputing = ranks.run(train_noise, stage, dict.fromkeys(BLOCKS, (1,)), ranks=2)
    for one, other in zip(recomputing, plain, strict=True):
        assert_same(one, other)
    assert plain[1]["blocks.0.norm.num_batches_tracked"] == 4


# Mistakes


def build(plan: Plan) -> None:
    training.prepare(Run(Recipe(), plan, engine=UNMERGED))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("root", "unit 'root' cannot be recomputed: it holds what is outside"),
        ("blocks.7", "unit 'blocks.7' cannot be recomputed: the model has no such block"),
    ],
)
def test_a_unit_that_cannot_be_recomputed_raises_on_all_ranks(
    ranks: Pool, stage: int, name: str, complaint: str
) -> None:
    failures = ranks.run_expecting_errors(build, plan_of(stage, {name: (0,)}))
    assert_raised(failures, complaint, kind=ValueError)
