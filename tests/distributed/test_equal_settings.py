"""Settings that must be equal on all ranks are compared in every step, at every stage."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import ranks as harness
import torch
import training
from ranks import Failure, Pool
from reference import Recipe
from torch import Tensor, nn
from training import STAGES, Run

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.zero.steps.step_settings import StepSettings

RECIPE = Recipe(batches=(12, 12, 12))


def run_of(stage: int) -> Run:
    return Run(RECIPE, Plan.manual("5,4,3", stage=stage))


def own(one: object, other: object) -> object:
    """`other` on rank 1."""
    return other if harness.rank() == 1 else one


def set_group(key: str, one: object, other: object) -> Callable[[HeteroZeroOptimizer], dict]:
    def change(optimizer: HeteroZeroOptimizer) -> dict:
        optimizer.param_groups[0][key] = own(one, other)
        return {}

    return change


def scaled(_optimizer: HeteroZeroOptimizer) -> dict:
    return {"scaler": poplar.GradScaler("cpu", init_scale=own(8.0, 16.0))}


DIFFERENT: dict[str, tuple[Callable[[HeteroZeroOptimizer], dict], str]] = {
    "max_norm": (lambda _: {"max_norm": own(1.0, 0.5)}, "max_norm is 1.0 on rank(s) [0, 2], 0.5"),
    "no max_norm": (lambda _: {"max_norm": own(1.0, None)}, "max_norm is 1.0 on rank(s) [0, 2]"),
    "loss": (lambda _: {"loss": own("mean", "sum")}, "loss='sum' without weight= on rank(s) [1]"),
    "weight": (lambda _: {"weight": own(None, lambda batch: 1.0)}, "with weight= on rank(s) [1]"),
    "scaler": (
        lambda _: {"scaler": own(None, poplar.GradScaler("cpu"))},
        "loss scaler is False on rank(s) [0, 2], True on rank(s) [1]",
    ),
    "scale": (scaled, "scale is tensor(8.0) on rank(s) [0, 2], tensor(16.0) on rank(s) [1]"),
    "lr": (
        set_group("lr", np.float32(0.5), np.float32(0.25)),
        "lr of param group 0 is 0.5 on rank(s) [0, 2], 0.25 on rank(s) [1]",
    ),
    "tensor lr": (
        lambda optimizer: set_group("lr", torch.tensor(0.5), torch.tensor(0.25))(optimizer),
        "lr of param group 0 is tensor(0.5) on rank(s) [0, 2], tensor(0.25) on rank(s) [1]",
    ),
    "tensor lr of one rank": (
        lambda optimizer: set_group("lr", 0.5, torch.tensor(0.5))(optimizer),
        "lr of param group 0 is 0.5 on rank(s) [0, 2], tensor(0.5) on rank(s) [1]",
    ),
    "betas": (set_group("betas", (0.9, 0.99), (0.9, 0.98)), "(0.9, 0.98) on rank(s) [1]"),
    "flag": (set_group("maximize", False, True), "maximize of param group 0 is False"),
    "nan": (set_group("lr", 0.1, float("nan")), "lr of param group 0: nan"),
    "nan max_norm": (lambda _: {"max_norm": own(1.0, float("nan"))}, "max_norm: nan"),
    "negative max_norm": (lambda _: {"max_norm": -0.5}, "max_norm=-0.5 would reverse"),
}


def train_around(run: Run, name: str) -> tuple[Failure | None, dict[str, Tensor]]:
    """A good step, one with different settings, and a good one."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    groups = [dict(group) for group in optimizer.param_groups]
    with harness.catching() as caught:
        options = DIFFERENT[name][0](optimizer)
        optimizer.train_step(training.loss_of(run.recipe), training.batch_of(run, 1), **options)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)
    training.take_step(run, model, optimizer, 2)
    return (caught or [None])[0], training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_name_what_differs_and_training_continues(
    ranks: Pool, stage: int, name: str
) -> None:
    answers = ranks.run(train_around, run_of(stage), name, ranks=3)
    training.assert_raised([failure for failure, _ in answers], DIFFERENT[name][1])
    for _, parameters in answers:
        training.assert_same(parameters, answers[0][1])


def clip_to_a_negative_norm(run: Run) -> None:
    """After the scaler has closed the step."""
    model, optimizer = training.prepare(run)
    scaler = poplar.GradScaler("cpu", init_scale=8.0)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
        scaler.scale(training.loss_of(run.recipe)(model, micro_batch)).backward()
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(-0.5)


def test_a_negative_norm_is_refused_after_unscaling(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(clip_to_a_negative_norm, run_of(2), ranks=3)
    training.assert_raised(failures, "would reverse the gradient")


NO_NORMS = (
    (1.0, 0, "norm_type=0 is no norm"),
    (1.0, -1.0, "norm_type=-1.0 is"),
    (1.0, math.nan, "norm_type=nan is"),
    (1.0, "x", "norm_type='x' is"),
    ("x", 2.0, "max_norm='x' is a str; give a number"),
    (None, 2.0, "max_norm"),
)
"""What the last rank clips with, and what all ranks are told."""


def clip_by_no_norm(run: Run) -> tuple[list[Failure | None], dict[str, Tensor]]:
    """Clip a step by each of these on one rank, and take a good step."""
    model, optimizer = training.prepare(run)
    failures = []
    for max_norm, norm_type, _ in NO_NORMS:
        for micro_batch in optimizer.micro_batches(training.batch_of(run, 0)):
            training.loss_of(run.recipe)(model, micro_batch).backward()
        with harness.catching() as caught:
            optimizer.clip_grad_norm_(own(1.0, max_norm), own(2.0, norm_type))
        failures.append((caught or [None])[0])
    training.take_step(run, model, optimizer, 2)
    return failures, training.whole_parameters(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_no_norm_is_refused_and_training_continues(ranks: Pool, stage: int) -> None:
    answers = ranks.run(clip_by_no_norm, run_of(stage), ranks=3)
    by_case = zip(*[failures for failures, _ in answers], strict=True)
    for failures, (*_, message) in zip(by_case, NO_NORMS, strict=True):
        training.assert_raised(failures, message)
    for _, parameters in answers:
        training.assert_same(parameters, answers[0][1])


def leave_out_an_update(run: Run) -> tuple[Failure | None, Failure | None]:
    """One rank does not call `step()`; the next step tells. A load mends it."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    state = optimizer.state_dict()
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    optimizer.clip_grad_norm_(1.0)
    if harness.rank() == 1:
        optimizer.zero_grad()
    else:
        optimizer.step()
    with harness.catching() as first:
        training.take_step(run, model, optimizer, 2)
    optimizer.load_state_dict(state)
    with harness.catching() as second:
        training.take_step(run, model, optimizer, 2)
    return (first or [None])[0], (second or [None])[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_has_left_out_an_update_is_noticed(ranks: Pool, stage: int) -> None:
    answers = ranks.run(leave_out_an_update, run_of(stage), ranks=3)
    training.assert_raised([first for first, _ in answers], "updates", "load a checkpoint")
    assert all(second is None for _, second in answers)


Take = Callable[[Run, nn.Module, HeteroZeroOptimizer, float], None]
"""Takes a step with a setting that comes after the ranks have compared their settings."""


def clip_after_unscaling(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, setting: float
) -> None:
    scaler = poplar.GradScaler("cpu", init_scale=8.0)
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
        scaler.scale(training.loss_of(run.recipe)(model, micro_batch)).backward()
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(setting)
    scaler.step(optimizer)


def set_lr_after_clipping(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, setting: float
) -> None:
    for micro_batch in optimizer.micro_batches(training.batch_of(run, 1)):
        training.loss_of(run.recipe)(model, micro_batch).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.param_groups[0]["lr"] = setting
    optimizer.step()


def set_lr_in_a_hook(
    run: Run, model: nn.Module, optimizer: HeteroZeroOptimizer, setting: float
) -> None:
    def set_lr(*_: object) -> None:
        optimizer.param_groups[0]["lr"] = setting

    hook = optimizer.register_step_pre_hook(set_lr)
    training.take_step(run, model, optimizer, 1)
    hook.remove()


SET_LATER: dict[Take, str] = {
    clip_after_unscaling: "max_norm=0.25",
    set_lr_after_clipping: "lr of param group 0=0.25",
    set_lr_in_a_hook: "lr of param group 0=0.25",
}


def set_later(run: Run, take: Take, differs: bool) -> list[Failure | None]:
    """The steps after such a step, and after a load."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)
    state = optimizer.state_dict()
    take(run, model, optimizer, float(own(0.5, 0.25)) if differs else 0.5)
    optimizer.param_groups[0]["lr"] = 0.1
    failures = []
    for _ in range(2):
        with harness.catching() as caught:
            training.take_step(run, model, optimizer, 2)
        failures.append((caught or [None])[0])
        optimizer.load_state_dict(state)
    return failures


@pytest.mark.parametrize("take", SET_LATER)
@pytest.mark.parametrize("stage", [0, 3])
def test_settings_that_come_later_are_compared_in_the_next_step(
    ranks: Pool, stage: int, take: Take
) -> None:
    answers = ranks.run(set_later, run_of(stage), take, differs=True, ranks=3)
    said = f"'{SET_LATER[take]}' on rank(s) [1]"
    training.assert_raised([first for first, _ in answers], said, "load a checkpoint")
    assert all(second is None for _, second in answers)


def test_equal_settings_may_come_later(ranks: Pool) -> None:
    for take in SET_LATER:
        assert ranks.run(set_later, run_of(2), take, differs=False, ranks=3) == [[None, None]] * 3


def set_lr_to_nan_after_clipping(run: Run) -> None:
    model, optimizer = training.prepare(run)
    set_lr_after_clipping(run, model, optimizer, float("nan"))


def test_nan_that_comes_later_is_refused(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(set_lr_to_nan_after_clipping, run_of(2), ranks=3)
    training.assert_raised(failures, "lr of param group 0: nan")


def test_flags_and_missing_settings_that_come_later_are_told_apart() -> None:
    closed = StepSettings([{"maximize": True, "clip": 1.0}], updates=0, max_norm=1.0)
    later = StepSettings([{"maximize": False, "clip": None}], updates=0)
    expected = "maximize of param group 0=False, clip of param group 0=None"
    assert later.later_than(closed) == expected


@pytest.mark.parametrize(("one", "other"), [(-1, -2), (0, 1), (1.0, 1.5), ((1, -1), (1, -2))])
def test_numbers_that_differ_have_another_digest(one: object, other: object) -> None:
    digests = [StepSettings([{"key": value}], updates=0).digest for value in (one, one, other)]
    assert digests[0] == digests[1] != digests[2]
