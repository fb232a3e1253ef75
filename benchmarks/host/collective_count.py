"""Counts collectives and the bytes that this rank sends, at torch's operators of process groups.

Every function of `torch.distributed` and every method of a process group ends in one of these
operators, so all engines are counted in the same way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
REDUCTIONS = (
    "alltoall_base_",
    "alltoall_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)


class CollectiveCount(TorchDispatchMode):
    """Counts the collectives that are issued in this context."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.calls: Counter[str] = Counter()
        """By operator."""
        self.sent: Counter[str] = Counter()
        """Bytes by kind: "gather" and "reduce" of parameters and gradients, and "other"."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            self.calls[name.strip("_")] += 1
            self.sent[_kind(name, args)] += self._bytes_sent(name, args)
        return func(*args, **(kwargs or {}))

    def _bytes_sent(self, name: str, args: tuple[Any, ...]) -> int:
        """By this rank, as a direct algorithm or a ring sends them."""
        others = self.ranks - 1
        if name in GATHERS:
            return others * _nbytes(args[1])
        if _is_gather(name, args):
            return _nbytes(args[1])
        if name == "alltoall_base_" and args[4]:
            rows = sum(args[4])
            return _nbytes(args[1]) * (rows - args[4][self.rank]) // rows if rows else 0
        if name in REDUCTIONS:
            return _nbytes(args[1]) * others // self.ranks
        if name in ("recv_", "barrier", "monitored_barrier_"):
            return 0
        if name == "allreduce_":
            return 2 * _nbytes(args[0]) * others // self.ranks
        return _nbytes(args[0])


def _kind(name: str, args: tuple[Any, ...]) -> str:
    if name in GATHERS or _is_gather(name, args):
        return "gather" if _first(args[1]).is_floating_point() else "other"
    return "reduce" if name in REDUCTIONS else "other"


def _is_gather(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an all-to-all sends one tensor to all ranks, as a gather of unequal slices does."""
    sent = {(t.data_ptr(), t.numel()) for t in args[1] if t.numel()} if name == "alltoall_" else ()
    return len(sent) == 1


def _first(value: Tensor | list[Any]) -> Tensor:
    return value if isinstance(value, torch.Tensor) else _first(value[0])


def _nbytes(value: Tensor | list[Any]) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value))
