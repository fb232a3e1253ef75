"""Buffers whose elements share memory (`expand`, `meshgrid`) are sent, measured and loaded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn

import poplar
from poplar import HeteroZeroOptimizer, Plan
from poplar.elastic import MemoryCheckpoints

PLAN = Plan(stage=2, global_batch=6, micro_batches=((4,), (2,)), shares=(0.6, 0.4))


class Gridded(nn.Module):
    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("grid", (torch.arange(4.0) + first).expand(3, 4))
        self.register_buffer("mask", torch.ones(()).expand(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.mask + self.grid[0])


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def optimizer_of(model: nn.Module, stage: int = 2) -> HeteroZeroOptimizer:
    plan = Plan(stage=stage, global_batch=6, micro_batches=PLAN.micro_batches, shares=PLAN.shares)
    return HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1
    )


def is_expanded(buffer: Tensor) -> bool:
    return 0 in buffer.stride()


def send(stage: int) -> tuple[list[float], bool]:
    """The ranks have other values, at first."""
    model = Gridded(first=float(harness.rank()))
    optimizer = optimizer_of(model, stage)
    optimizer.train_step(loss_fn, torch.ones(PLAN.samples(harness.rank()), 4))
    return model.grid.flatten().tolist(), is_expanded(model.mask)


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_get_the_values_of_the_first(ranks: Pool, stage: int) -> None:
    for values, is_kept in ranks.run(send, stage, ranks=2):
        assert values == [0.0, 1.0, 2.0, 3.0] * 3
        assert is_kept  # equal values are not sent


def load(folder: str, in_memory: bool) -> tuple[list[float], list[float]]:
    saved, other = Gridded(), Gridded(first=5.0)
    optimizer = optimizer_of(saved)
    if in_memory:
        MemoryCheckpoints(optimizer, folder=folder).save(1)
        MemoryCheckpoints(optimizer_of(other), folder=folder).load_latest()
    else:
        poplar.save_checkpoint(folder, optimizer)
        poplar.load_checkpoint(folder, optimizer_of(other))
    return saved.grid.flatten().tolist(), other.grid.flatten().tolist()


@pytest.mark.parametrize("in_memory", [False, True])
def test_checkpoints_are_loaded_into_them(ranks: Pool, tmp_path: Path, in_memory: bool) -> None:
    for saved, loaded in ranks.run(load, str(tmp_path / "saved"), in_memory, ranks=2):
        assert loaded == saved


def measure() -> tuple[bool, bool, float]:
    model = Gridded()
    group = harness.group()
    found = poplar.verify(model, loss_fn, torch.ones(6, 4), PLAN, process_group=group)
    profile = poplar.profile_cluster(
        model,
        loss_fn,
        torch.ones(2, 4),
        process_group=group,
        seconds=0.2,
        max_batch=4,
        progress=False,
        cache=False,
    )
    return found.ok, is_expanded(model.grid), profile.devices[0].points[0].seconds


def test_models_with_them_are_verified_and_profiled(ranks: Pool) -> None:
    for is_right, is_kept, seconds in ranks.run(measure, ranks=2):
        assert is_right
        assert is_kept
        assert 0 < seconds < math.inf
