"""The first forward of a step, which runs before the ranks have agreed to take the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poplar.values.errors import CollectiveTimeout
from poplar.zero.micro_batch_loss import MicroBatchLoss


def failing(error: Exception) -> MicroBatchLoss:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        raise error

    return MicroBatchLoss(loss_fn, nn.Identity(), rank=0)


def test_an_early_loss_is_returned_once() -> None:
    calls: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(batch)
        return batch.sum()

    forward = MicroBatchLoss(loss_fn, nn.Identity(), rank=0)
    forward.compute_early(torch.ones(2))
    assert [float(forward(torch.ones(2))), float(forward(torch.ones(3)))] == [2.0, 3.0]
    assert len(calls) == 2


def test_an_error_of_an_early_forward_is_raised_in_its_pass() -> None:
    forward = failing(KeyError("labels"))
    forward.compute_early(None)
    with pytest.raises(KeyError, match="labels"):
        forward(None)


def test_a_timeout_of_an_early_forward_is_raised_at_once() -> None:
    """Its pass cannot be completed, so later collectives would only repeat the error."""
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        failing(CollectiveTimeout("waiting for rank 1")).compute_early(None)
