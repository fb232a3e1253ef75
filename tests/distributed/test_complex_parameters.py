"""A complex parameter that is stored as real numbers, as an error advises, trains as in PyTorch."""

from __future__ import annotations

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from training import STAGES

from poplar import HeteroZeroOptimizer, Plan


class Filter(nn.Module):
    """A filter of 5 frequencies, between layers."""

    def __init__(self, is_real: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        weight = torch.randn(5, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight) if is_real else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * weight, 8))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def train(stage: int) -> tuple[Tensor, Tensor]:
    """The parameter after three steps of the engine, and of one process with complex numbers."""
    model, alone = Filter(is_real=True), Filter(is_real=False)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        plan=Plan(stage=stage, global_batch=6, micro_batches=((4,), (2,)), shares=(0.6, 0.4)),
        process_group=harness.group(),
        compute_dtype=torch.float32,
        lr=0.05,
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    own = slice(0, 4) if harness.rank() == 0 else slice(4, 6)
    for step in range(3):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        optimizer.train_step(loss_fn, batch[own])
        reference.zero_grad()
        loss_fn(alone, batch).backward()
        reference.step()
    with optimizer.full_parameters():
        return model.weight.detach().clone(), torch.view_as_real(alone.weight.detach()).clone()


@pytest.mark.parametrize("stage", STAGES)
def test_real_form_of_a_complex_parameter_trains_as_one_process(ranks: Pool, stage: int) -> None:
    for weight, expected in ranks.run(train, stage, ranks=2):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
