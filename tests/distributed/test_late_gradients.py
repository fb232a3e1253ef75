"""A parameter that gets its first gradient in a later step starts its momentum there."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan

SETTINGS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
]


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 8)
        self.uses_late = False

    def forward(self, x: Tensor) -> Tensor:
        return self.early(x) + (self.late(x) if self.uses_late else 0.0)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train_with_poplar(stage: int, settings: dict[str, Any]) -> tuple[list[Tensor], Any]:
    model = Late().to(harness.device())
    plan = Plan(stage=stage, global_batch=4, micro_batches=((3,), (1,)), shares=(0.75, 0.25))
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, plan=plan, process_group=harness.group(), lr=0.1, **settings
    )
    for step in range(5):
        model.uses_late = step >= 2
        part = batch_of(step)[:3] if harness.rank() == 0 else batch_of(step)[3:]
        optimizer.train_step(loss_fn, part.to(harness.device()))
    groups = (optimizer.full_state_dict() or {"param_groups": []})["param_groups"]
    with optimizer.full_parameters():
        return [p.detach().cpu().clone() for p in model.parameters()], groups


def train_with_torch(settings: dict[str, Any]) -> list[Tensor]:
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=False, **settings)
    for step in range(5):
        model.uses_late = step >= 2
        optimizer.zero_grad()
        loss_fn(model, batch_of(step)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_momentum_starts_with_the_first_gradient(
    ranks: Pool, stage: int, settings: dict[str, Any]
) -> None:
    expected = train_with_torch(settings)
    for parameters, groups in ranks.run(train_with_poplar, stage, settings, ranks=2):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        assert all(group["fused"] is None for group in groups)  # Poplar's choice is its own
