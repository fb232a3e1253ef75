"""Memory that runs out at each allocation of a step: all ranks raise, and the next step works."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import poplar
from two_ranks.rank import RANKS, Rank
from two_ranks.training import (
    STAGES,
    TOLERANCE,
    Training,
    relative_error,
    train_in_one_process,
)

LEAST_BYTES = {"cuda": 1, "cpu": 512}
"""Of an allocation that may fail. On the CPU, the smaller values of the control channel, which are
in host memory on every device, are left out."""


class Allocations(TorchDispatchMode):
    """Counts the operators that allocate memory on the device; one of them may run out of it."""

    def __init__(self, device: torch.device, fails: int | None = None) -> None:
        super().__init__()
        self.count, self._kind, self._fails = 0, device.type, fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        if returned and all(value.alias_info is None for value in returned):
            self.count += self._allocated(result)
            if self.count == self._fails:
                self._fails = None
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
        total = agreed(attempt(own, training, None)[1], 1)
        tried, applied, wrong = 0, 2, []
        ends = time.monotonic() + (own.ends - time.monotonic()) / (len(STAGES) - stage)
        for place in torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist():
            if not agreed(time.monotonic() < ends, 0):
                break
            error, _ = attempt(own, training, place + 1)
            after, _ = attempt(own, training, None)
            tried, applied = tried + 1, applied + 1 + (error is None)
            raised = torch.OutOfMemoryError if own.rank else poplar.RankFailed
            if after is not None or not isinstance(error, raised):
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
                not messages and off <= applied * TOLERANCE,
                "; ".join(messages[:3]),
                allocations=total,
                tried=tried,
                wrong=len(messages),
                parameters=off,
            )


def attempt(own: Rank, training: Training, fails: int | None) -> tuple[Exception | None, int]:
    """A step; rank 1 counts its allocations, of which number `fails` fails. Returns the error."""
    counted = Allocations(own.device, fails)
    try:
        with counted if own.rank == 1 else nullcontext():
            training.step()
    except Exception as error:
        return error, counted.count
    return None, counted.count


def agreed(value: int, source: int) -> int:
    """The value of rank `source`. Collective."""
    tensor = torch.tensor(int(value))
    dist.broadcast(tensor, source)
    return int(tensor)
