"""A step issues few more collective calls than FSDP2's, counted on torch's fake process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import fake_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from poplar import HeteroZeroOptimizer, Plan

RANKS = 8
BLOCKS = [f"{number}" for number in range(6)]
SMALL_CALLS = 6
"""Of values: the loss, the norm, and what ranks agree on."""


class CallCount(TorchDispatchMode):
    """Counts at torch's operators of process groups, in which the calls of every engine end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._schema.name.partition("::")[2].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def new_model() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in BLOCKS)
    return nn.Sequential(*blocks, nn.Linear(32, 4))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def poplar_step(stage: int) -> Callable[[], object]:
    optimizer = HeteroZeroOptimizer(
        new_model(),
        torch.optim.AdamW,
        plan=Plan.even(RANKS, RANKS, 1, stage),
        units=BLOCKS,
        lr=1e-4,
        communicator="process_group",
        on_nonfinite="skip",  # the fake group sends nothing that is meant
    )
    return lambda: optimizer.train_step(loss_of, torch.ones(1, 32), max_norm=1.0)


def fsdp2_step(stage: int) -> Callable[[], object]:
    model = new_model()
    for block in model[: len(BLOCKS)]:
        fully_shard(block, reshard_after_forward=stage == 3)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(model, torch.ones(1, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def calls_of_third(step: Callable[[], object]) -> Counter[str]:
    """Poplar records the order of units in the first step."""
    step()
    step()
    with CallCount() as counted:
        step()
    return counted.calls


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_has_few_more_collective_calls_than_fsdp2(stage: int) -> None:
    with fake_ranks(RANKS):
        ours, theirs = (calls_of_third(new(stage)) for new in (poplar_step, fsdp2_step))
    units = len(BLOCKS) + 1
    again = len(BLOCKS) if stage == 3 else 0
    assert theirs == {"allgather_base": units + again, "reduce_scatter_base": units}
    assert ours.total() <= theirs.total() + SMALL_CALLS, ours
