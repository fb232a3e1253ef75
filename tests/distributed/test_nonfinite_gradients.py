"""A step whose gradient is NaN or infinite is applied on no rank, and such values are not saved."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import ranks as harness
import torch
import training
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import STAGES, Run

import poplar
from poplar import HeteroZeroOptimizer, Plan, PoplarError
from poplar.elastic import MemoryCheckpoints

BAD_RANK = 1
RECIPE = Recipe(batches=(24, 24, 24))  # without clipping


def run_of(stage: int, **engine: object) -> Run:
    return Run(RECIPE, Plan.manual("5,4,3", stage=stage, passes=2), engine=engine)


class Poisoned(torch.autograd.Function):
    """The identity, whose gradient is a given value."""

    @staticmethod
    def forward(ctx, loss: Tensor, value: float) -> Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, ctx.value), None


def take_poisoned_step(run: Run, optimizer: HeteroZeroOptimizer, value: float) -> bool:
    """A step in which the gradient of one pass of one rank is bad, with finite losses."""
    passes = iter(range(9))

    def loss(model: nn.Module, batch: object) -> Tensor:
        good = training.loss_of(run.recipe)(model, batch)
        is_bad = harness.rank() == BAD_RANK and next(passes) == 1
        return Poisoned.apply(good, value) if is_bad else good

    return bool(optimizer.train_step(loss, training.batch_of(run, 1)).skipped)


class Around(NamedTuple):
    """What a rank sees around a bad step."""

    failure: Failure | None
    skipped: bool
    warned: list[str]
    changed: bool
    """Whether the bad step changed parameters."""
    parameters: dict[str, Tensor]
    """After a further step."""


def train_around(run: Run, value: float) -> Around:
    """A good, a bad and a good step."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    before, skipped = training.whole_parameters(model, optimizer), False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with harness.catching() as caught:
            skipped = take_poisoned_step(run, optimizer, value)
        after = training.whole_parameters(model, optimizer)
    changed = any(not torch.equal(after[name], value) for name, value in before.items())
    training.take_step(run, model, optimizer, 2)
    messages = [str(warning.message) for warning in warned]
    parameters = training.whole_parameters(model, optimizer)
    return Around((caught or [None])[0], skipped, messages, changed, parameters)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_rank_applies_it(ranks: Pool, stage: int, choice: str, value: float) -> None:
    run = run_of(stage, on_nonfinite=choice)
    answers = ranks.run(train_around, run, value, ranks=3)
    for answer in answers:
        assert not answer.changed
        assert all(bool(part.isfinite().all()) for part in answer.parameters.values())
        if choice == "skip":
            assert (answer.failure, answer.skipped) == (None, True)
        else:
            assert answer.failure is not None
            assert "the gradient norm is not finite" in answer.failure.message
    by_rank = [any("skipped: the gradient norm" in text for text in one.warned) for one in answers]
    assert by_rank == [choice == "skip", False, False]


def break_parameters(optimizer: HeteroZeroOptimizer) -> None:
    """An update by which parameters become NaN, though the gradient is finite."""
    for run in optimizer._training.update.runs:
        is_replica = optimizer._training.engine.strategy.replicates_state
        if run.tensor is not None and (harness.rank() == BAD_RANK or is_replica):
            run.tensor.data.view(-1)[0] = math.nan


def save_broken_parameters(run: Run, folder: str) -> tuple[list[Failure], list[str]]:
    """What saving raises once parameters are NaN, and the checkpoints that remain."""
    model, optimizer = training.prepare(run)
    manager = poplar.CheckpointManager(folder, optimizer, keep=1)
    memory = MemoryCheckpoints(optimizer, folder=f"{folder}/memory")
    training.take_step(run, model, optimizer, 0)
    manager.save(1)
    memory.save(1)
    break_parameters(optimizer)
    failures: list[Failure] = []
    for save in (
        lambda: manager.save(2),
        lambda: memory.save(2),
        lambda: poplar.save_checkpoint(f"{folder}/other", optimizer),
        lambda: optimizer.save_model(f"{folder}/model.safetensors"),
        lambda: training.take_step(run, model, optimizer, 1),
    ):
        with harness.catching() as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save()
        failures += caught
    assert memory.load_latest() == 1
    memory.remove()
    return failures, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_are_not_finite_are_not_saved_nor_skipped_for_ever(
    ranks: Pool, tmp_path: Path, stage: int, choice: str
) -> None:
    run = run_of(stage, on_nonfinite=choice)
    answers = ranks.run(save_broken_parameters, run, str(tmp_path), ranks=3)
    for failures, remaining in answers:
        assert remaining == ["memory", "step-00000001"]
        assert len(failures) == 5
        assert all(failure.is_a(PoplarError) for failure in failures)
    for failure in answers[BAD_RANK][0][:4]:
        assert "has values that are NaN or infinite" in failure.message
    assert "not finite" in answers[BAD_RANK][0][4].message or choice == "skip"


def scale_broken_parameters(run: Run) -> list[Failure]:
    """What a loss scaler does with parameters that are NaN: it would lower the scale for ever."""
    _, optimizer = training.prepare(run)
    scaler = poplar.GradScaler(harness.device().type, init_scale=8.0)
    loss, batch = training.loss_of(run.recipe), training.batch_of(run, 0)
    optimizer.train_step(loss, batch, scaler=scaler)
    break_parameters(optimizer)
    with harness.catching() as caught:
        optimizer.train_step(loss, batch, scaler=scaler)
    return caught


def test_a_scaler_does_not_skip_for_ever(ranks: Pool) -> None:
    by_rank = ranks.run(scale_broken_parameters, run_of(3), ranks=3)
    training.assert_raised([failures[0] for failures in by_rank], "NaN or infinite")


def scale_with_an_empty_first_group() -> bool:
    """Whether a step changes the parameters; param groups by weight decay may be empty."""
    model = nn.Linear(4, 1).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        params=[{"params": [], "weight_decay": 0.1}, {"params": list(model.parameters())}],
        stage=1,
        process_group=harness.group(),
        lr=0.1,
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = poplar.GradScaler(harness.device().type, init_scale=8.0)
    batch = torch.ones(2, 4, device=harness.device())
    optimizer.train_step(lambda model, x: model(x).square().mean(), batch, scaler=scaler)
    return not any(map(torch.equal, before, model.parameters()))


def test_a_scaler_unscales_if_the_first_group_is_empty(ranks: Pool) -> None:
    assert ranks.run(scale_with_an_empty_first_group, ranks=2) == [True, True]


BAD_WEIGHTS = {
    "infinite sum": (lambda: 1e308, "sum to inf"),
    "negative": (lambda: -1.0 if harness.rank() == BAD_RANK else 3.0, "weight -1.0"),
    "nan": (lambda: math.nan if harness.rank() == BAD_RANK else 3.0, "weight nan"),
    "infinite": (lambda: math.inf if harness.rank() == BAD_RANK else 3.0, "weight inf"),
    "one per sample": (lambda: torch.ones(2), "must return one number, got (2,)"),
    "none": (lambda: None, "must return one number, got NoneType"),
}


def train_with_bad_weights(run: Run, which: str) -> list[Failure]:
    _, optimizer = training.prepare(run)
    with harness.catching() as caught:
        optimizer.train_step(
            training.loss_of(run.recipe),
            training.batch_of(run, 0),
            weight=lambda batch: BAD_WEIGHTS[which][0](),
        )
    return caught


@pytest.mark.parametrize("which", BAD_WEIGHTS)
def test_weights_that_are_no_finite_number_or_negative_raise(ranks: Pool, which: str) -> None:
    by_rank = ranks.run(train_with_bad_weights, run_of(1), which, ranks=3)
    training.assert_raised([failures[0] for failures in by_rank], BAD_WEIGHTS[which][1])


def fail_in_a_hook(dtype: torch.dtype, own_scaler: bool) -> tuple[str, list[bool]]:
    """The error of a step in which rank 1's hook raises, and whether later steps were applied."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=1,
        process_group=harness.group(),
        compute_dtype=dtype,
        lr=0.1,
    )
    scaler = poplar.GradScaler(harness.device().type, init_scale=8.0) if own_scaler else None
    batch = torch.ones(2, 4, device=harness.device(), dtype=dtype)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def fail(*_: object) -> None:
        if harness.rank() == 1:
            raise ZeroDivisionError("planted")

    hook = optimizer.register_step_pre_hook(fail)
    with harness.catching() as caught:
        optimizer.train_step(loss, batch, scaler=scaler, max_norm=1.0)
    hook.remove()
    applied = []
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.train_step(loss, batch, scaler=scaler, max_norm=1.0)
        applied.append(not all(map(torch.equal, before, model.parameters())))
    return caught[0].message, applied


@pytest.mark.parametrize(
    ("dtype", "own_scaler"), [(torch.float32, True), (torch.float16, False), (torch.float32, False)]
)
def test_training_with_a_scaler_continues_after_a_hook_has_failed(
    ranks: Pool, dtype: torch.dtype, own_scaler: bool
) -> None:
    for message, applied in ranks.run(fail_in_a_hook, dtype, own_scaler, ranks=2):
        assert "planted" in message
        assert applied[-1]  # the scale of the first step may be too large for fp16
