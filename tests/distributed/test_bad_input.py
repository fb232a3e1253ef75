"""Wrong input raises a clear error on every rank, never hangs and changes nothing.

A mistake in a step is made between two correct steps. It must not change the parameters, and the
next step must give the result of the reference, which runs only the correct steps.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import models
import pytest
import ranks as harness
import reference
import torch
import training
from models import ModelSpec
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import (
    IDLE_RANK,
    STAGES,
    Answer,
    Run,
    assert_close,
    assert_raised,
    assert_unchanged,
    uneven,
)

import poplar
from poplar import HeteroZeroOptimizer, PoplarError, RankFailed
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

RECIPE = Recipe(batches=(12, 12))
BAD_RANK = 2
"""The rank that makes the mistake, if only one does."""

Mistake = Callable[[Run, nn.Module, HeteroZeroOptimizer], None]


class LossError(Exception):
    """An exception in a user's loss function."""


def make(run: Run, mistake: Mistake) -> Answer:
    model, optimizer = training.prepare(run)
    act = partial(mistake, run, model, optimizer)
    return training.between_good_steps(run, model, optimizer, act)


# Batches


def resized(batch: dict, samples: int) -> dict:
    """The batch with another number of samples: truncated, or with copies of the first one."""
    index = [i if i < len(batch["tokens"]) else 0 for i in range(samples)]
    return {key: value[index] for key, value in batch.items()}


def one_sample_too_many(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = training.batch_of(run, 1)
    if harness.rank() == BAD_RANK:
        batch = resized(batch, len(batch["tokens"]) + 1)
    optimizer.train_step(training.loss_of(run.recipe), batch)


def one_sample_on_one_rank(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = training.batch_of(run, 1)
    if harness.rank() == BAD_RANK:
        batch = resized(batch, 1)  # no short global batch is split like this
    optimizer.train_step(training.loss_of(run.recipe), batch)


def no_batch(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = None if harness.rank() == BAD_RANK else training.batch_of(run, 1)
    optimizer.train_step(training.loss_of(run.recipe), batch)


def inconsistent_batch_sizes(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = training.batch_of(run, 1)
    if harness.rank() == BAD_RANK:
        batch["targets"] = batch["targets"][:-1]
    optimizer.train_step(training.loss_of(run.recipe), batch)


def extra_sample_in_the_loop(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = training.batch_of(run, 1)
    if harness.rank() == BAD_RANK:
        batch = resized(batch, len(batch["tokens"]) + 1)
    for micro_batch in optimizer.micro_batches(batch):
        training.loss_of(run.recipe)(model, micro_batch).backward()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (one_sample_too_many, "4 samples"),
        (one_sample_on_one_rank, "1 sample"),
        (no_batch, "no batch"),
        (inconsistent_batch_sizes, "targets"),
        (extra_sample_in_the_loop, "4 samples"),
    ],
)
def test_batch_that_does_not_match_the_plan_raises(
    ranks: Pool, mistake: Mistake, expected: str, stage: int
) -> None:
    results = ranks.run(make, Run(RECIPE, uneven(stage)), mistake)
    failures = assert_unchanged(results, RECIPE)
    assert expected in failures[BAD_RANK].message
    for rank, failure in enumerate(failures):
        assert failure is not None, f"rank {rank} raised nothing"
        assert rank == BAD_RANK or f"rank {BAD_RANK}" in failure.message, failure
    assert failures[BAD_RANK].is_a(ValueError) or failures[BAD_RANK].is_a(PoplarError)


def batch_for_idle_rank(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    batch = training.batch_of(run, 1) or training.on_device(models.data(2, seed=0))
    optimizer.train_step(training.loss_of(run.recipe), batch)


def test_batch_on_rank_without_samples_raises(ranks: Pool) -> None:
    run = Run(RECIPE, uneven(0, ((2, 3), (), (1, 2), (2, 2))))
    failures = assert_unchanged(ranks.run(make, run, batch_for_idle_rank), RECIPE)
    assert_raised(failures, "rank 1")
    assert "2 samples" in failures[1].message


def train_with_placeholders(run: Run) -> dict[str, Tensor]:
    """Train with a placeholder sample on the rank without samples, as the sampler draws it."""
    model, optimizer = training.prepare(run)
    for step in range(len(run.recipe.batches)):
        placeholder = training.on_device(models.data(1, seed=0))
        batch = training.batch_of(run, step) or placeholder
        optimizer.train_step(training.loss_of(run.recipe), batch)
    return training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_placeholder_sample_is_dropped(ranks: Pool, stage: int) -> None:
    for parameters in ranks.run(train_with_placeholders, Run(RECIPE, uneven(stage, IDLE_RANK))):
        training.assert_close(parameters, reference.train(RECIPE).parameters)


# Exceptions


def failing_loss(where: str, run: Run) -> Callable[[nn.Module, dict], Tensor]:
    """The recipe's loss, which raises on one rank."""
    loss_fn, entered = training.loss_of(run.recipe), [0]

    def fail(*_: object) -> None:
        raise LossError(f"no more samples in {where}")

    def loss(model: nn.Module, micro_batch: dict) -> Tensor:
        entered[0] += 1
        if harness.rank() != BAD_RANK:
            return loss_fn(model, micro_batch)
        if where == "the second pass" and entered[0] == 2:
            fail()
        if where != "the middle of backward":
            return loss_fn(model, micro_batch)
        handle = model.blocks[0].register_forward_hook(
            lambda module, args, out: out.register_hook(fail) and None
        )
        try:
            return loss_fn(model, micro_batch)
        finally:
            handle.remove()

    return loss


def fail_in_second_pass(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    optimizer.train_step(failing_loss("the second pass", run), training.batch_of(run, 1))


def fail_in_backward(run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer) -> None:
    optimizer.train_step(failing_loss("the middle of backward", run), training.batch_of(run, 1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mistake", [fail_in_second_pass, fail_in_backward])
def test_exception_in_loss_of_one_rank(ranks: Pool, mistake: Mistake, stage: int) -> None:
    results = ranks.run(make, Run(RECIPE, uneven(stage)), mistake)
    failures = assert_unchanged(results, RECIPE)
    assert_raised(failures)
    for rank, failure in enumerate(failures):
        if rank == BAD_RANK:
            assert failure.is_a(LossError), failure
        else:
            assert failure.is_a(RankFailed), failure
            assert f"rank {BAD_RANK}" in failure.message, failure
            assert "no more samples" in failure.message, failure


def fail_on_the_first_rank_at_once(run: Run) -> list[Failure]:
    model, optimizer = training.prepare(run)

    def loss(model: nn.Module, micro_batch: dict) -> Tensor:
        value = training.loss_of(run.recipe)(model, micro_batch)
        if harness.rank() == 0:
            raise LossError("image 17 is broken")
        return value

    with harness.catching() as caught:
        optimizer.train_step(loss, training.batch_of(run, 0))
    training.take_step(run, model, optimizer, 0)
    return caught


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_of_the_first_rank_in_the_first_step_is_named_on_all(
    ranks: Pool, stage: int
) -> None:
    results = ranks.run(fail_on_the_first_rank_at_once, Run(RECIPE, uneven(stage)))
    first, *others = (failure for (failure,) in results)
    assert first.is_a(LossError), first
    for failure in others:
        assert failure.is_a(RankFailed), failure
        assert "nothing was applied. rank 0: LossError: image 17 is broken" in failure.message


# The loop over micro_batches


def leave_first_step(run: Run, affected: int) -> tuple[Failure | None, dict[str, Tensor]]:
    """Leave the loop before the first backward, when no order has been recorded yet."""
    model, optimizer = training.prepare(run)
    with harness.catching() as caught:
        for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
            if harness.rank() == affected:
                break
            training.loss_of(run.recipe)(model, micro_batch).backward()
        optimizer.step()
    for step in range(len(run.recipe.batches)):
        training.take_step(run, model, optimizer, step)
    return (caught or [None])[0], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("affected", [0, 2])
def test_one_rank_leaves_the_first_step(ranks: Pool, affected: int, stage: int) -> None:
    for failure, left in ranks.run(leave_first_step, Run(RECIPE, uneven(stage)), affected):
        assert failure is not None
        assert f"rank {affected}" in failure.message
        assert_close(left, reference.train(RECIPE).parameters)


def save_after_leaving(run: Run, folder: Path, leaving: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """All parameters after a good step, after a save between steps, and as they were saved."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    before = training.whole_parameters(model, optimizer)
    with contextlib.suppress(RuntimeError):
        for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
            training.loss_of(run.recipe)(model, micro_batch).backward()
            if harness.rank() in leaving:
                break
        optimizer.step()
    poplar.save_checkpoint(folder, optimizer)
    optimizer.apply_plan(run.plan)
    training.take_step(run, model, optimizer, 1)
    poplar.load_checkpoint(folder, optimizer)
    return [before, training.whole_parameters(model, optimizer)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("leaving", [(0, 1, 2, 3), (BAD_RANK,)], ids=["all", "one"])
def test_a_checkpoint_may_be_saved_after_a_loop_that_was_left(
    ranks: Pool, tmp_path: Path, leaving: tuple[int, ...], stage: int
) -> None:
    run = Run(RECIPE, uneven(stage))
    for before, saved in ranks.run(save_after_leaving, run, tmp_path / "saved", leaving):
        training.assert_same(before, saved)


# Construction


def construct_then_train(run: Run, construct: Callable[[Run, nn.Module], object]) -> Answer:
    """Construct with a mistake; then correctly, on the same model, and train."""
    model = models.build(run.recipe.spec).to(harness.device())
    with harness.catching() as caught:
        construct(run, model)
    optimizer = training.optimizer_of(model, run)
    for step in range(2):
        training.take_step(run, model, optimizer, step)
    return (caught or [None])[0], [], training.whole_parameters(model, optimizer)


def construct_with(run: Run, model: nn.Module, **changes: object) -> HeteroZeroOptimizer:
    arguments = {"plan": run.plan, "lr": 1e-3, "process_group": harness.group(), **changes}
    return HeteroZeroOptimizer(model, torch.optim.AdamW, **arguments)


def with_different_plan(run: Run, model: nn.Module) -> None:
    micro_batches = run.plan.micro_batches[::-1] if harness.rank() == BAD_RANK else None
    plan = replace(run.plan, micro_batches=micro_batches) if micro_batches else run.plan
    construct_with(run, model, plan=plan)


def with_different_stage(run: Run, model: nn.Module) -> None:
    stage = 3 - run.plan.stage if harness.rank() == BAD_RANK else run.plan.stage
    construct_with(run, model, plan=uneven(stage))


def with_different_model(run: Run, model: nn.Module) -> None:
    if harness.rank() == BAD_RANK:
        model = models.build(ModelSpec(hidden=33))
    construct_with(run, model.to(harness.device()))


def with_different_frozen_parameters(run: Run, model: nn.Module) -> None:
    if harness.rank() == BAD_RANK:
        model = models.build(ModelSpec(frozen=True))
    construct_with(run, model.to(harness.device()))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("construct", "patterns"),
    [
        (with_different_plan, ("plan", str(BAD_RANK))),
        (with_different_stage, ("plan",)),
        (with_different_model, ("model", str(BAD_RANK))),
        (with_different_frozen_parameters, ("model",)),
    ],
)
def test_mismatched_plans_and_models_raise(
    ranks: Pool, construct: Callable, patterns: tuple[str, ...], stage: int
) -> None:
    results = ranks.run(construct_then_train, Run(RECIPE, uneven(stage)), construct)
    failures = assert_unchanged(results, RECIPE)
    assert_raised(failures, *patterns)
    assert all(f.is_a(ValueError) or f.is_a(RuntimeError) for f in failures)


def train_with_batch_norm(stage: int, engine: dict, mode: bool) -> bool:
    """Run one step in training or evaluation mode; returns whether a parameter changed."""
    spec = ModelSpec(kind="batch_norm")
    run = Run(Recipe(spec=spec, batches=(12,)), uneven(stage), engine=engine)
    model, optimizer = training.prepare(run)
    model.train(mode)
    before = training.whole_parameters(model, optimizer)
    training.take_step(run, model, optimizer, 0)
    after = training.whole_parameters(model, optimizer)
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_can_be_allowed(ranks: Pool, stage: int) -> None:
    assert all(ranks.run(train_with_batch_norm, stage, {"allow_forward_state": True}, True))


def fail_in_training_mode(sync: bool) -> list[Failure]:
    """What raises for a BatchNorm that is in training mode after the optimizer was built.

    A `SyncBatchNorm` over the ranks of this call has its state allowed.
    """
    recipe = Recipe(spec=ModelSpec(kind="batch_norm"))
    model = models.build(recipe.spec).to(harness.device())
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, harness.group())
    model.eval()
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=0,
        process_group=harness.group(),
        allow_forward_state=sync,
        lr=0.1,
    )
    model.train()
    batch = training.on_device(recipe.part(0, 0, 2))
    with harness.catching() as caught:
        if sync:
            optimizer.train_step(models.mean_over_samples, batch)
        else:
            models.mean_over_samples(model, batch).backward()
    return caught


@pytest.mark.parametrize("sync", [False, True])
def test_batch_norm_is_refused_when_it_gets_into_training_mode(ranks: Pool, sync: bool) -> None:
    kind = "SyncBatchNorm" if sync else "BatchNorm"
    for caught in ranks.run(fail_in_training_mode, sync, ranks=2):
        assert f"module 'norm' is a {kind} in training mode" in caught[0].message


def build_with_sync_batch_norm() -> None:
    model = models.build(ModelSpec(kind="batch_norm")).to(harness.device())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, harness.group())
    options = {"process_group": harness.group(), "allow_forward_state": True, "lr": 0.1}
    HeteroZeroOptimizer(model, torch.optim.SGD, stage=0, **options)


def test_sync_batch_norm_of_one_rank_is_a_batch_norm(ranks: Pool) -> None:
    ranks.run(build_with_sync_batch_norm, ranks=1)


def read_model_state(run: Run) -> tuple[dict, dict, str]:
    """The elements in `model.state_dict()`, the whole parameters, and why it was not pickled."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    state = model.state_dict()
    held = {name: (value.start, value.local.cpu().clone()) for name, value in shards(state)}
    held |= {name: (0, value.cpu().flatten()) for name, value in state.items() if name not in held}
    with harness.catching() as caught:
        pickle.dumps(state)
    return held, training.whole_parameters(model, optimizer), caught[0].message if caught else ""


def shards(state: dict) -> list[tuple[str, ShardTensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, ShardTensor)]


@pytest.mark.parametrize("stage", STAGES)
def test_model_state_dict_has_the_values_that_a_rank_stores(ranks: Pool, stage: int) -> None:
    recipe = replace(RECIPE, spec=ModelSpec(tied=True))
    answers = ranks.run(read_model_state, Run(recipe, uneven(stage)))
    for name, value in answers[0][1].items():
        found = torch.full((value.numel(),), float("nan"))
        for held, _, _ in answers:
            start, local = held[name]
            found[start : start + local.numel()] = local
        assert torch.equal(found.view(value.shape), value), name
    refused = "model.state_dict() has only this rank's part" if stage == 3 else ""
    assert all(refused in why and bool(why) == bool(refused) for _, _, why in answers)


def test_missing_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        HeteroZeroOptimizer(models.build(ModelSpec()), torch.optim.AdamW, stage=0, lr=1e-3)


def test_model_without_trainable_parameters_raises(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(optimize_nothing)
    assert_raised(failures, "parameter", kind=ValueError)


def optimize_nothing() -> None:
    model = models.build(ModelSpec()).requires_grad_(False)
    poplar.HeteroZeroOptimizer(
        model, torch.optim.AdamW, stage=0, process_group=harness.group(), lr=1e-3
    )
