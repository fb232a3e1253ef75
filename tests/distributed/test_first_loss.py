"""The first `train_step` warns once if the loss of a language model is weighted by samples."""

from __future__ import annotations

import warnings
from typing import Any

import models
import pytest
import ranks
import torch
import training
from ranks import Pool
from reference import Recipe
from torch import nn
from training import STAGES, Run

import poplar
from poplar import Plan

WEIGHTS = {
    "none": {},
    "tokens": {"weight": poplar.tokens(shift=False, labels="targets")},
}


def plan_of(stage: int) -> Plan:
    return Plan.manual("1,3,2", stage=stage, passes=2)


def warnings_of_two_steps(run: Run, loss_fn: Any, weight: str) -> list[str]:
    """What this rank warns of."""
    _, optimizer = training.prepare(run)
    batch = training.batch_of(run, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.train_step(loss_fn, batch, **WEIGHTS[weight])
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_over_tokens_warns_once_on_one_rank(ranks: Pool, stage: int) -> None:
    run = Run(Recipe(batches=(12,), loss="tokens"), plan_of(stage))
    by_rank = ranks.run(warnings_of_two_steps, run, models.mean_over_tokens, "none", ranks=3)
    assert [len(own) for own in by_rank] == [0, 1, 0]
    assert "weight=poplar.tokens(shift=False, labels='targets') to train_step" in by_rank[1][0]


@pytest.mark.parametrize(
    ("loss_fn", "weight"), [(models.mean_over_tokens, "tokens"), (models.mean_over_samples, "none")]
)
def test_right_weights_do_not_warn(ranks: Pool, loss_fn: Any, weight: str) -> None:
    run = Run(Recipe(batches=(12,), loss="tokens"), plan_of(0))
    assert ranks.run(warnings_of_two_steps, run, loss_fn, weight, ranks=3) == [[], [], []]


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_does_not_count_in_the_loss_warns_once_on_one_rank(
    ranks: Pool, stage: int
) -> None:
    run = Run(Recipe(batches=(12,), loss="tokens"), plan_of(stage))
    by_rank = ranks.run(warnings_of_two_steps, run, models.mean_over_samples, "tokens", ranks=3)
    assert [len(own) for own in by_rank] == [0, 1, 0]
    assert "mean over samples, not over what weight= returns: pass no weight=" in by_rank[1][0]


def warnings_of_a_criterion(stage: int, *, frozen: bool) -> list[tuple[str, str]]:
    """Where and of what a loss with parameters of its own warns, in two steps."""
    run = Run(Recipe(batches=(12,)), plan_of(stage))
    _, optimizer = training.prepare(run)
    criterion = nn.ParameterList([torch.ones(1)]).requires_grad_(not frozen).to(ranks.device())

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return criterion[0].squeeze() * models.mean_over_samples(model, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.train_step(loss_fn, training.batch_of(run, 0))
    return [(warning.filename, str(warning.message)) for warning in caught]


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_the_loss_that_are_not_in_the_model_warn_once(
    ranks: Pool, stage: int
) -> None:
    """On one rank, at the line of the step. Each rank would train other values of them."""
    first, (found,), last = ranks.run(warnings_of_a_criterion, stage, frozen=False, ranks=3)
    assert found[0] == __file__
    assert "not in the model of the optimizer, with the shape(s) '(1,)'." in found[1]
    assert first == last == []
    assert ranks.run(warnings_of_a_criterion, stage, frozen=True, ranks=3) == [[], [], []]


def random_numbers_and_modes(run: Run) -> tuple[list[float], bool]:
    """Random numbers that forwards of the step draw, and whether the model trains."""
    model, optimizer = training.prepare(run)
    drawn: list[float] = []
    modes: list[bool] = []

    def forward(module: nn.Module, _inputs: Any) -> None:
        modes.append(module.training)
        drawn.append(float(torch.rand(())))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return models.mean_over_samples(model, batch) + 0.0 * torch.rand(())

    model.register_forward_pre_hook(forward)
    torch.manual_seed(5)
    optimizer.train_step(loss_fn, training.batch_of(run, 0))
    return drawn, all(modes)


def test_the_step_is_as_without_the_check(ranks: Pool) -> None:
    run = Run(Recipe(batches=(12,), loss="tokens"), plan_of(2))
    generator = torch.Generator().manual_seed(5)
    expected = [float(torch.rand((), generator=generator)) for _ in range(4)][::2]
    assert ranks.run(random_numbers_and_modes, run, ranks=3) == [(expected, True)] * 3
