"""Training at every stage, against one process on the whole batch."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from llama import next_byte_loss
from torch import Tensor

import poplar
from two_ranks.rank import Rank
from two_ranks.training import (
    SHARES,
    STAGES,
    STEPS,
    TOLERANCE,
    Training,
    relative_error,
    train_in_one_process,
)


def exact(own: Rank) -> None:
    """Three steps with an evaluation and a checkpoint after the first one."""
    expected, losses = train_in_one_process(own.device, STEPS)
    for stage in STAGES:
        for shares in SHARES:
            began = time.monotonic()
            training = Training(own, stage, shares, recompute=shares is SHARES[1])
            found = [training.step().loss]
            found.append(training.optimizer.evaluate(next_byte_loss, [training.batch]))
            folder = own.folder / f"saved-{stage}-{shares[0]}"
            poplar.save_checkpoint(folder, training.optimizer)
            found += [training.step().loss for _ in range(STEPS - 1)]
            trained = training.parameters()
            error = relative_error(trained, expected)
            reference = [losses[0], losses[1], *losses[1:]]
            off = max(abs(a / b - 1) for a, b in zip(found, reference, strict=True))
            training.optimizer.release()
            if own.rank == 0:
                own.note(
                    "exact",
                    f"stage {stage}, shares {shares}",
                    max(error, off) <= TOLERANCE,
                    parameters=error,
                    losses=off,
                    seconds=time.monotonic() - began,
                )
            if shares is SHARES[0]:
                note_host_state(own, stage, trained)


def note_host_state(own: Rank, stage: int, expected: Mapping[str, Tensor]) -> None:
    """With state in host memory on both ranks, in part on one, parameters have the same bits."""
    began = time.monotonic()
    training = Training(own, stage, SHARES[0], host_state=(0.5, 1.0))
    for _ in range(STEPS):
        training.step()
    found = training.parameters()
    is_equal = all(torch.equal(found[name], value) for name, value in expected.items())
    held = training.optimizer.memory()["host"]
    training.optimizer.release()
    if own.rank == 0:
        case = f"stage {stage}, state in host memory"
        seconds = time.monotonic() - began
        own.note("exact", case, is_equal and held > 0, host_bytes=held, seconds=seconds)
