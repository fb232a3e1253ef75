"""Ranks that are in different calls: an error on all ranks names every rank's call, at once.

Causes are loops whose length differs between ranks, and calls that only some ranks make.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Failure, Pool
from subset import choose
from torch import nn

import poplar
from poplar import HeteroZeroOptimizer, Plan

TIMEOUT = timedelta(minutes=2)
"""Longer than a call of the pool may take: an error before it is not the deadline's."""
OTHER = 1
"""The rank that makes another call."""
Calls = dict[str, Callable[[HeteroZeroOptimizer], Any]]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def own_loop(optimizer: HeteroZeroOptimizer) -> None:
    for batch in optimizer.micro_batches(torch.ones(2, 16)):
        loss_of(optimizer._training.model, batch).backward()
    optimizer.step()


def calls(folder: str) -> Calls:
    """The public calls that all ranks must make together, by the name that errors show."""
    plan = Plan.even(harness.WORLD, 2 * harness.WORLD, 1, 3)
    return {
        "opening a step": lambda o: o.train_step(loss_of, torch.ones(2, 16)),
        "evaluate()": lambda o: o.evaluate(loss_of, [torch.ones(2, 16)]),
        "save_checkpoint": lambda o: poplar.save_checkpoint(f"{folder}/checkpoint", o),
        "save_model": lambda o: o.save_model(f"{folder}/model"),
        "full_state_dict()": lambda o: o.full_state_dict(),
        "release()": lambda o: o.release(),
        "full_parameters()": lambda o: o.full_parameters().__enter__(),
        "apply_plan()": lambda o: o.apply_plan(plan),
        "micro_batches": own_loop,
    }


def trained(group: dist.ProcessGroup, stage: int, transport: str) -> HeteroZeroOptimizer:
    """The optimizer of a new model, after a step."""
    optimizer = HeteroZeroOptimizer(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        torch.optim.SGD,
        stage=stage,
        lr=0.1,
        process_group=group,
        communicator=transport,
        timeout=TIMEOUT,
    )
    optimizer.train_step(loss_of, torch.ones(2, 16))
    return optimizer


def make_different_calls(
    stage: int, transport: str, pairs: list[tuple[str, str]], folder: str
) -> list[Failure | None]:
    """The error of this rank for each pair of calls."""
    found: list[Failure | None] = []
    for ours, theirs in pairs:
        optimizer = trained(dist.new_group(list(range(harness.WORLD))), stage, transport)
        harness.note(f"{ours} and {theirs}")
        with harness.catching() as caught:
            calls(folder)[theirs if harness.rank() == OTHER else ours](optimizer)
        found.append(caught[0] if caught else None)
    return found


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("stage", [0, 3])
def test_different_calls_raise_on_all_ranks(
    ranks: Pool, tmp_path: Path, stage: int, transport: str
) -> None:
    pairs = list(itertools.permutations(calls(""), 2))
    loops = ("opening a step", "micro_batches")
    # Both loops take part in one step. At stage 0 no rank needs others to have the parameters.
    pairs = [p for p in pairs if p not in (loops, loops[::-1])]
    pairs = [p for p in pairs if stage == 3 or "full_parameters()" not in p]
    pairs = random.Random(stage).sample(pairs, choose(quick=4, full=len(pairs)))
    answers = ranks.run(make_different_calls, stage, transport, pairs, str(tmp_path))
    wrong = []
    for (ours, theirs), failures in zip(pairs, zip(*answers, strict=True), strict=True):
        for rank, failure in enumerate(failures):
            names = ["opening a step" if n == "micro_batches" else n for n in (ours, theirs)]
            ok = failure is not None and "the ranks are in different calls" in failure.message
            if not ok or not all(name in failure.message for name in names):
                wrong.append((ours, theirs, rank, failure and failure.message[:400]))
    assert not wrong, "\n".join(map(str, wrong))


def train_beside_a_failure(transport: str, is_shared: bool) -> str:
    """The error of an optimizer's step after another optimizer has failed; empty: none."""
    groups = [dist.new_group(list(range(harness.WORLD))) for _ in range(2 - is_shared)]
    failing, other = (trained(group, 2, transport) for group in (groups[0], groups[-1]))
    with harness.catching():
        (failing.release if harness.rank() == OTHER else failing.full_state_dict)()
    with harness.catching() as caught:
        other.train_step(loss_of, torch.ones(2, 16))
    return caught[0].message if caught else ""


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_an_optimizer_with_a_process_group_of_its_own_survives_another_one(
    ranks: Pool, transport: str
) -> None:
    assert not any(ranks.run(train_beside_a_failure, transport, False))


def test_an_optimizer_names_the_one_that_closed_their_connections(ranks: Pool) -> None:
    for message in ranks.run(train_beside_a_failure, "process_group", True):
        assert "another optimizer or call on the same process group failed" in message
        assert "process_group=torch.distributed.new_group" in message
        assert "the ranks are in different calls" in message
