"""A rank that raises, comes late or ends: the other one raises in time and lives on."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from llama import next_byte_loss
from single_gpu import ranks
from torch import Tensor, nn

import poplar
from two_ranks.rank import Rank
from two_ranks.training import Training

DEADLINE_SECONDS, LATE_SECONDS, IN_TIME_SECONDS = 5.0, 12.0, 10.0


class Planted(RuntimeError):
    """The error that `raises` raises."""


def raises(own: Rank) -> None:
    """Rank 1 raises in its loss; the next step works."""

    def act() -> None:
        raise Planted("planted")

    training = started(own)
    error, seconds = failing_step(own, training, act)
    training.step()
    expected = Planted if own.rank else poplar.RankFailed
    note(own, "raises", error, expected, seconds)


def late(own: Rank) -> None:
    """Rank 1 comes after the deadline."""
    error, seconds = failing_step(own, started(own), lambda: time.sleep(LATE_SECONDS))
    note(own, "late", error, poplar.CollectiveTimeout, seconds)
    if own.rank == 0:
        time.sleep(max(0.0, LATE_SECONDS + 2.0 - seconds))  # nothing must end this process now


def exits(own: Rank) -> None:
    """The process of rank 1 ends."""
    error, seconds = failing_step(own, started(own), ranks.leave)
    note(own, "exits", error, poplar.CollectiveTimeout, seconds)


def started(own: Rank) -> Training:
    """A training with one step done."""
    training = Training(own, 3, timeout=timedelta(seconds=DEADLINE_SECONDS))
    training.step()
    return training


def failing_step(
    own: Rank, training: Training, act: Callable[[], None]
) -> tuple[BaseException | None, float]:
    """A step in whose loss rank 1 calls `act`; returns this rank's error and its seconds."""

    def loss_fn(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        if own.rank == 1:
            act()
        return next_byte_loss(model, part)

    dist.barrier()
    began, error = time.monotonic(), None
    try:
        training.step(loss_fn)
    except Exception as caught:
        error = caught
    return error, time.monotonic() - began


def note(
    own: Rank, task: str, error: BaseException | None, expected: type[Exception], seconds: float
) -> None:
    """Write the row of rank 0."""
    if own.rank == 0:
        ok = isinstance(error, expected) and seconds < IN_TIME_SECONDS
        own.note(task, "in the loss", ok, repr(error)[:200], seconds=seconds)
