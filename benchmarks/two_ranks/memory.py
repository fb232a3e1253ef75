"""Memory that runs out at each allocation of a step: all ranks raise, and the next step works."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import poplar
from poplar.zero.steps.step import Step
from two_ranks.rank import RANKS, Rank
from two_ranks.training import (
    STAGES,
    TOLERANCE,
    Training,
    relative_error,
    train_in_one_process,
)

LEAST_BYTES = {"cuda": 1, "cpu": 2048}
"""Of an allocation that may fail. On the CPU, the smaller values of the control channel, which are
in host memory on every device, are left out."""
TRYING_PART = 0.7
"""Of the time of a stage; the rest is for the steps of the reference."""


class Allocations(TorchDispatchMode):
    """Counts the operators that allocate memory on the device; one of them may run out of it.

    Those of the closing of the step and of the update are left out: there a rank that fails stops
    all ranks, which ends the test.
    """

    def __init__(self, device: torch.device, fails: int | None = None) -> None:
        super().__init__()
        self.count, self.has_failed, self.is_active = 0, False, True
        self._kind, self._fails = device.type, fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        # Collectives return the tensors that they were given.
        may_allocate = returned and func.namespace != "c10d"
        if self.is_active and may_allocate and all(one.alias_info is None for one in returned):
            self.count += self._allocated(result)
            if self.count == self._fails:
                self.has_failed, self._fails = True, None
                raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        return result

    def _allocated(self, result: Any) -> bool:
        tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        return any(
            tensor.device.type == self._kind and tensor.nbytes >= LEAST_BYTES[self._kind]
            for tensor in tensors
        )


def memory(own: Rank) -> None:
    """Rank 1 runs out of memory at one allocation after the other, as far as there is time."""
    for stage in STAGES:
        training = Training(own, stage, on_out_of_memory="raise")
        attempt(own, training, None)
        total = agreed(attempt(own, training, None)[1].count, 1)
        tried, applied, wrong = 0, 2, []
        left = (own.ends - time.monotonic()) / (len(STAGES) - stage)
        ends = time.monotonic() + TRYING_PART * left
        places = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
        for place in places[: own.tries]:
            if not agreed(time.monotonic() < ends, 0):
                break
            error, counted = attempt(own, training, place + 1)
            after, _ = attempt(own, training, None)
            has_failed = bool(agreed(counted.has_failed, 1))  # a step may allocate less often
            tried, applied = tried + has_failed, applied + 1 + (error is None)
            raised = torch.OutOfMemoryError if own.rank else poplar.RankFailed
            if after is not None or (has_failed and not isinstance(error, raised)):
                wrong.append(f"allocation {place + 1}: {error!r}, then {after!r}"[:300])
        off = relative_error(training.parameters(), train_in_one_process(own.device, applied)[0])
        training.optimizer.release()
        by_rank: list[list[str]] = [[] for _ in range(RANKS)]
        dist.all_gather_object(by_rank, wrong)
        messages = [message for one in by_rank for message in one]
        if own.rank == 0:
            own.note(
                "memory",
                f"stage {stage}",
                not messages and tried > 0 and off <= applied * TOLERANCE,
                "; ".join(messages[:3]),
                allocations=total,
                tried=tried,
                wrong=len(messages),
                parameters=off,
            )


def attempt(
    own: Rank, training: Training, fails: int | None
) -> tuple[Exception | None, Allocations]:
    """A step; rank 1 counts its allocations, of which number `fails` fails. Returns the error."""
    counted = Allocations(own.device, fails)
    close = Step.close

    def uncounted_close(*arguments: Any, **options: Any) -> Any:
        counted.is_active = False
        return close(*arguments, **options)

    try:
        with (
            counted if own.rank == 1 else nullcontext(),
            mock.patch.object(Step, "close", uncounted_close),
        ):
            training.step()
    except Exception as error:
        return error, counted
    return None, counted


def agreed(value: int, source: int) -> int:
    """The value of rank `source`. Collective."""
    tensor = torch.tensor(int(value))
    dist.broadcast(tensor, source)
    return int(tensor)
