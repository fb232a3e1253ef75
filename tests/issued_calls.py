"""Records what a rank hands to torch.distributed, on its fake process group of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from poplar.comm import Group


@dataclass(frozen=True)
class Call:
    """One call of torch.distributed."""

    name: str
    """The operator of c10d."""
    sent: dict[int, int]
    """Elements for each global rank but the own one."""


class RecordCalls(TorchDispatchMode):
    """Records all-to-alls, all-gathers and messages; other calls by their name only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name = func._schema.name.split("::")
        if library == "c10d":
            sent = {rank: numel for rank, numel in _sent(name, args) if rank != dist.get_rank()}
            self.calls.append(Call(name, sent))
        # The fake group copies what is sent to where it receives, and fails if sizes differ.
        nothing = torch.empty(0)
        if name == "allgather_":
            args = ([[nothing] * len(args[0][0])], [nothing], *args[2:])
        elif name == "alltoall_":
            args = ([nothing] * len(args[0]), [nothing] * len(args[1]), *args[2:])
        elif name == "alltoall_base_":
            args = (nothing, nothing, args[2], [], [], *args[5:])
        return func(*args, **kwargs or {})


def _sent(name: str, args: Any) -> Iterator[tuple[int, int]]:
    if name == "alltoall_base_":
        _, sent, group, _, sizes, *_ = args
        ranks = len(_ranks(group))
        sizes = sizes or [sent.numel() // ranks] * ranks
        yield from zip(_ranks(group), sizes, strict=True)
    elif name == "alltoall_":
        _, parts, group, *_ = args
        yield from zip(_ranks(group), (part.numel() for part in parts), strict=True)
    elif name in ("_allgather_base_", "allgather_"):
        own, group = (args[1], args[2]) if name == "_allgather_base_" else (args[1][0], args[2])
        yield from ((rank, own.numel()) for rank in _ranks(group))
    elif name == "send":
        (tensor,), group, peer, _ = args
        yield _ranks(group)[peer], tensor.numel()


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))


@contextmanager
def fake_group(rank: int, size: int, kind: type[Group] = Group) -> Iterator[Group]:
    """The group of all ranks as `rank` sees it; its collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield of_ranks(range(size), kind)
    finally:
        dist.destroy_process_group()


def of_ranks(ranks: Sequence[int], kind: type[Group] = Group) -> Group:
    """The group of these ranks."""
    process_group = dist.new_group(list(ranks), backend="fake")
    return kind(tuple(ranks), process_group, process_group, timedelta(seconds=5))
