"""`evaluate` leaves every module in its mode, and waits for ranks with more batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor, nn
from training import STAGES

from poplar import HeteroZeroOptimizer


class Merging(nn.Linear):
    """A layer whose `train` does more than set a flag, as adapters that merge their weights."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def evaluate_once(stage: int) -> list[tuple[bool, bool]]:
    shared = nn.Dropout(0.5)
    model = nn.Sequential(
        Merging(8, 8), nn.Sequential(shared, nn.Dropout(0.5)), nn.Sequential(shared, Merging(8, 8))
    ).to(harness.device())
    model[1].eval()
    model[2][1].eval()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=harness.group(), lr=0.1
    )
    before = modes(model)
    optimizer.evaluate(loss_fn, [torch.ones(2, 8, device=harness.device())])
    assert modes(model) == before
    return before


def modes(model: nn.Module) -> list[tuple[bool, bool]]:
    return [(module.training, getattr(module, "merged", False)) for module in model.modules()]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_module_has_its_mode_afterwards(ranks: Pool, stage: int) -> None:
    ranks.run(evaluate_once, stage, ranks=2)


def evaluate_on_one_rank(stage: int) -> float:
    model = nn.Linear(8, 8).to(harness.device())
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=stage,
        process_group=harness.group(),
        timeout=timedelta(seconds=2),
        lr=0.1,
    )

    def slow(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.4)
        return loss_fn(model, batch)

    batches = [torch.ones(2, 8, device=harness.device())] * (8 if harness.rank() == 0 else 0)
    return optimizer.evaluate(slow, batches)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_batches_waits_longer_than_the_deadline(ranks: Pool, stage: int) -> None:
    first, second = ranks.run(evaluate_on_one_rank, stage, ranks=2)
    assert first == second


def evaluate_with_a_fault(stage: int, place: str) -> str:
    """Rank 1 fails at its second batch or in its first loss; returns what a rank raises."""
    model = nn.Sequential(nn.Linear(8, 8), Merging(8, 8)).to(harness.device())
    group = harness.group()
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=group, lr=0.1
    )
    batch, before = torch.ones(2, 8, device=harness.device()), modes(model)
    fails = harness.rank() == 1

    def loader() -> Iterator[Tensor]:
        yield batch
        if fails and place == "loader":
            raise KeyError("lost")
        yield from [batch] * 2

    def faulty(model: nn.Module, batch: Tensor) -> Tensor:
        if fails and place == "loss":
            raise KeyError("lost")
        return loss_fn(model, batch)

    with harness.catching() as caught:
        optimizer.evaluate(faulty, loader())
    assert modes(model) == before
    optimizer.evaluate(loss_fn, [batch])
    return caught[0].type


@pytest.mark.parametrize("place", ["loader", "loss"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_fails_in_evaluate_does_not_leave_the_others_waiting(
    ranks: Pool, stage: int, place: str
) -> None:
    """Every module has its mode afterwards, and the optimizer can be used again."""
    assert ranks.run(evaluate_with_a_fault, stage, place, ranks=2) == ["RankFailed", "KeyError"]
