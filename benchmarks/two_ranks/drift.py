"""A rank that becomes slower: the plan follows, and training still equals one process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from llama import next_byte_loss
from torch import Tensor, nn

from poplar import HeteroZeroOptimizer, profile_cluster, search
from two_ranks.rank import Rank
from two_ranks.training import (
    STAGES,
    TOLERANCE,
    new_batch,
    new_model,
    parameters_of,
    part_of,
    relative_error,
    train_in_one_process,
)

SAMPLES = 16
SLOW_AT, MOST_STEPS, AFTER = 12, 60, 3
"""Steps until rank 1 becomes slower, in which another plan must have come, and after it."""
LEARNING_RATE = 1e-3
"""Small, so that rounding errors do not grow in so many steps."""
SECONDS = {False: 0.002, True: 0.01}
"""By sample, of a rank that is slow or not: more than the model takes on any device."""


@dataclass
class Loss:
    """Waits on the host within the pass, for each sample: longer once the rank is slow."""

    is_slow: bool = False

    def __call__(self, model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        time.sleep(SECONDS[self.is_slow] * len(part["input"]))
        return next_byte_loss(model, part)


def drift(own: Rank) -> None:
    """Follow one change at each stage."""
    for stage in STAGES:
        began = time.monotonic()
        model, optimizer = followed(own, stage)
        loss, samples = Loss(), []
        while len(samples) < MOST_STEPS and not has_changed(samples[:-AFTER]):
            loss.is_slow = own.rank == 1 and len(samples) >= SLOW_AT
            plan, batch = optimizer.plan, new_batch(own.device, SAMPLES)
            assert plan is not None
            samples.append(plan.samples(1))
            optimizer.train_step(loss, part_of(batch, plan, own.rank), max_norm=1.0)
        trained = parameters_of(model, optimizer)
        optimizer.release()
        expected, _ = train_in_one_process(own.device, len(samples), SAMPLES, lr=LEARNING_RATE)
        off = relative_error(trained, expected)
        if own.rank == 0:
            own.note(
                "drift",
                f"stage {stage}",
                has_changed(samples) and off <= len(samples) * TOLERANCE,
                f"samples of rank 1: {samples[SLOW_AT - 1]}, then {samples[-1]}",
                steps_to_plan=len(samples) - AFTER - SLOW_AT,
                parameters=off,
                seconds=time.monotonic() - began,
            )


def followed(own: Rank, stage: int) -> tuple[nn.Module, HeteroZeroOptimizer]:
    """A model with a plan from a short profile, which follows the speeds."""
    model = new_model(own.device)
    profile = profile_cluster(
        model,
        Loss(),
        new_batch(own.device, 2),
        stages=(stage,),
        max_batch=SAMPLES,
        seconds=3,
        cache=False,
        progress=False,
        compute_dtype=torch.float32,
    )
    plan = search(profile, global_batch=SAMPLES, stages=(stage,), leave_out="never")
    optimizer = HeteroZeroOptimizer(
        model, torch.optim.AdamW, plan=plan, compute_dtype=torch.float32, lr=LEARNING_RATE, eps=1e-3
    )
    optimizer.follow_drift(profile, replan="auto", leave_out="never")
    return model, optimizer


def has_changed(samples: list[int]) -> bool:
    """Whether rank 1 got fewer samples after it had become slower."""
    return any(one < samples[SLOW_AT - 1] for one in samples[SLOW_AT:])
