"""Functions that take a model, a plan or a profile say which class they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import poplar
from poplar import Plan

PLAN = Plan.manual("4", stage=1)
SWAPPED: Any = PLAN
"""A plan where a profile belongs."""
FILE: Any = "plan.json"


@pytest.fixture
def optimizer(one_rank: None) -> poplar.HeteroZeroOptimizer:
    return poplar.HeteroZeroOptimizer(nn.Linear(4, 1), torch.optim.SGD, plan=PLAN, lr=0.1)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda: poplar.search(SWAPPED, global_batch=4), "cluster must be a poplar.ClusterProfile"),
        (lambda: poplar.predict(SWAPPED, PLAN), "cluster must be a poplar.ClusterProfile"),
        (lambda: poplar.explain(SWAPPED, PLAN), "cluster must be a poplar.ClusterProfile"),
        (lambda: poplar.simulate(SWAPPED, PLAN), "cluster must be a poplar.ClusterProfile"),
        (lambda: poplar.HeteroBatchSampler(8, FILE, rank=0), "plan must be a poplar.Plan, got str"),
        (lambda: poplar.split_stream([], FILE, rank=0), "plan must be a poplar.Plan, got str"),
    ],
)
def test_another_class_is_a_type_error(call: Callable[[], object], needed: str) -> None:
    with pytest.raises(TypeError, match=needed):
        call()


def test_parameters_are_no_model(one_rank: None) -> None:
    parameters: Any = nn.Linear(4, 1).parameters()
    arguments = (parameters, lambda model, batch: model(batch).mean(), torch.ones(4, 4))
    for call in (
        lambda: poplar.HeteroZeroOptimizer(parameters, torch.optim.SGD, plan=PLAN, lr=0.1),
        lambda: poplar.autotune(*arguments, global_batch=4),
        lambda: poplar.profile_cluster(*arguments),
        lambda: poplar.distribute(*arguments, global_batch=4),
        lambda: poplar.verify(*arguments, PLAN),
    ):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got generator"):
            call()


def test_the_optimizer_takes_a_plan(one_rank: None) -> None:
    with pytest.raises(TypeError, match=r"plan must be a poplar.Plan, got str"):
        poplar.HeteroZeroOptimizer(nn.Linear(4, 1), torch.optim.SGD, plan=FILE, lr=0.1)


def test_its_methods_name_the_class(optimizer: poplar.HeteroZeroOptimizer) -> None:
    with pytest.raises(TypeError, match=r"plan must be a poplar.Plan, got str"):
        optimizer.apply_plan(FILE)
    with pytest.raises(TypeError, match=r"profile must be a poplar.ClusterProfile, got Plan"):
        optimizer.follow_drift(SWAPPED)


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (5, "weight must be a function of a micro-batch.*got int"),
        (lambda batch: None, "must return one number, got NoneType"),
        (lambda batch: torch.ones(len(batch)), r"must return one number, got \(4,\)"),
        (lambda batch: np.ones(len(batch)), r"must return one number, got \(4,\)"),
    ],
)
def test_a_weight_is_one_number(
    optimizer: poplar.HeteroZeroOptimizer, weight: Any, got: str
) -> None:
    batch = torch.ones(4, 4)
    for call in (
        lambda: optimizer.train_step(mean, batch, weight=weight),
        lambda: list(optimizer.micro_batches(batch, weight=weight)),
        lambda: optimizer.evaluate(mean, [batch], weight=weight),
        lambda: poplar.verify(nn.Linear(4, 1), mean, batch, PLAN, weight=weight),
    ):
        with pytest.raises(TypeError, match=got):
            call()
    assert optimizer.train_step(mean, batch).loss


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda model, batch: model(batch).view(-1), r"scalar tensor, got \(4,\)"),
        (lambda model, batch: (mean(model, batch), batch), "scalar tensor, got tuple"),
    ],
)
def test_an_evaluated_loss_is_one_number(
    optimizer: poplar.HeteroZeroOptimizer, loss: Any, got: str
) -> None:
    with pytest.raises(TypeError, match=got):
        optimizer.evaluate(loss, [torch.ones(4, 4)])


@pytest.mark.parametrize("given", ["1.0", torch.ones(2)], ids=["text", "several"])
def test_a_norm_is_a_number(optimizer: poplar.HeteroZeroOptimizer, given: Any) -> None:
    with pytest.raises(TypeError, match=rf"max_norm=.* is a {type(given).__name__}; give a number"):
        optimizer.train_step(mean, torch.ones(4, 4), max_norm=given)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Sequential, dict])
def test_a_model_is_not_its_parameters(one_rank: None, kind: Any) -> None:
    layer = nn.Linear(4, 1)
    given = {nn.Linear: layer, nn.Sequential: nn.Sequential(layer), dict: {"params": [layer.bias]}}
    with pytest.raises(TypeError, match=rf"params is one {kind.__name__}; pass a list of param"):
        poplar.HeteroZeroOptimizer(layer, torch.optim.SGD, plan=PLAN, params=given[kind], lr=0.1)
