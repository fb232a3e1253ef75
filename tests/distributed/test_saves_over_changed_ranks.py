"""What a program keeps to save with works over any changes of the ranks that train."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as harness
import torch
from failing_calls import DEADLINE
from ranks import Failure, Pool
from test_checkpoint_safety import files_limited_to
from test_checkpoints import BATCH, build, train
from training import STAGES, assert_raised, whole_parameters

from poplar import CheckpointManager, HeteroZeroOptimizer, Plan
from poplar.elastic import MemoryCheckpoints

KINDS = ("memory", "spares in memory", "on disk", "asynchronous")


def plan_of(stage: int, *left_out: int) -> Plan:
    active = 3 - len(left_out)
    shares = torch.arange(active, 0, -1, dtype=torch.float64)
    even = Plan.even(active, BATCH, BATCH // active, stage=stage)
    return replace(even, shares=tuple((shares / shares.sum()).tolist())).beside(left_out)


def saver_of(kind: str, optimizer: HeteroZeroOptimizer, folder: str) -> Any:
    if kind.endswith("memory"):
        has_spares = kind.startswith("spares")
        own = f"{folder}/{harness.rank()}" if has_spares else folder  # else one host
        return MemoryCheckpoints(optimizer, folder=own, spare_shards=int(has_spares))
    return CheckpointManager(folder, optimizer, keep=2, asynchronous=kind == "asynchronous")


def save_over_changes(kind: str, stage: int, left_out: Sequence[Sequence[int]], path: str) -> None:
    """Change to each of these ranks, take and save a step; then load the last one."""
    _, optimizer = build(plan_of(stage), timeout=DEADLINE)
    saver = saver_of(kind, optimizer, path)
    for step, ranks in enumerate(left_out):
        optimizer.apply_plan(plan_of(stage, *ranks))
        train(optimizer, step, 1)
        saver.save(step + 1)
    if kind == "asynchronous":
        saver.wait()
    model = optimizer._training.model
    expected = whole_parameters(model, optimizer)
    model, optimizer = build(plan_of(stage), seed=1, timeout=DEADLINE)
    assert saver_of(kind, optimizer, path).load_latest() == len(left_out)
    found = whole_parameters(model, optimizer)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "left_out",
    [
        [(), (2,), (2,), ()],
        [(1,), ()],
        [(), (2,), (0,), (), ()],
    ],
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_kept_savers_follow_the_ranks(
    ranks: Pool, kind: str, stage: int, left_out: Sequence[Sequence[int]], tmp_path: Path
) -> None:
    ranks.run(save_over_changes, kind, stage, left_out, str(tmp_path), ranks=3)


def change_after_a_failed_save(folder: str) -> list[Failure]:
    _, optimizer = build(plan_of(2), timeout=DEADLINE)
    manager = CheckpointManager(folder, optimizer, asynchronous=True)
    with files_limited_to(1000 if harness.rank() == 1 else resource.RLIM_INFINITY):
        manager.save(1)
        with harness.catching() as caught:
            optimizer.apply_plan(plan_of(2, 2))
    optimizer.apply_plan(plan_of(2, 2))
    train(optimizer, 1, 1)
    manager.save(2)
    assert manager.load_latest() == 2
    return caught


def test_a_change_of_the_ranks_raises_the_error_of_a_save(ranks: Pool, tmp_path: Path) -> None:
    raised = ranks.run(change_after_a_failed_save, str(tmp_path), ranks=3)
    assert_raised([failure for (failure,) in raised], "step-00000001.incomplete/__1_0.distcp")
