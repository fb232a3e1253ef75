"""Plans that change between steps, and a rank left out, against one process on the whole batch."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from llama import next_byte_loss

from poplar import HeteroZeroOptimizer, Plan
from two_ranks.rank import Rank
from two_ranks.training import (
    OPTIONS,
    STAGES,
    TOLERANCE,
    new_batch,
    new_model,
    parameters_of,
    part_of,
    relative_error,
    train_in_one_process,
)


def plans(own: Rank) -> None:
    """One job whose plan changes before every step; then one per stage that has a rank left out."""
    even = Plan.manual((4, 4), stage=0)
    changes = [
        even,
        replace(even, micro_batches=((3,), (5,))),
        Plan.manual((6, 2), stage=3, shares=(0.7, 0.3)),
        Plan.manual((6, 2), stage=3, shares=(0.2, 0.8)),
        Plan.manual((2, 6), stage=1, shares=(1.0, 0.0)),
        replace(Plan.manual((2, 6), stage=2), host_state=(1.0, 0.0)),
        Plan.manual((8, 0), stage=0),
    ]
    check(own, "changes of batches, shares and stage", changes)
    for stage in STAGES:
        alone = Plan.manual((8,), stage=stage).beside((1,))
        check(own, f"stage {stage}, rank 1 left out", [alone] * 3)
    dist.barrier()  # the process ends without what `atexit` does for the rank that is left out


def check(own: Rank, case: str, plan_of_step: list[Plan]) -> None:
    """Train one step with each plan, and note how far the parameters are from one process's."""
    began = time.monotonic()
    expected, losses = train_in_one_process(own.device, len(plan_of_step))
    whole, model = new_batch(own.device, plan_of_step[0].global_batch), new_model(own.device)
    optimizer = HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=plan_of_step[0],
        compute_dtype=torch.float32,
        communicator="process_group",
        **OPTIONS,
    )
    found, times = [], []
    for plan in plan_of_step:
        if plan != optimizer.plan:
            optimizer.apply_plan(plan)
        batch = part_of(whole, plan, own.rank)
        result = optimizer.train_step(next_byte_loss, batch, max_norm=1.0)
        found.append(float(result.loss))
        times.append(result.rank_times)
    trained = parameters_of(model, optimizer)
    optimizer.release()
    error = relative_error(trained, expected)
    off = max(abs(a / b - 1) for a, b in zip(found, losses, strict=True))
    if own.rank == 0:
        timed = len(times[-1]) > 0  # on a device, they are those of an earlier step
        own.note(
            "plans",
            case,
            max(error, off) <= TOLERANCE and timed,
            parameters=error,
            losses=off,
            seconds=time.monotonic() - began,
        )
