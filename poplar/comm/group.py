"""Who takes part: the one place that knows ranks, world size, deadlines and the torch process
groups.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)

from poplar.errors import CollectiveTimeout
from poplar.system.trace import Trace

DEFAULT_TIMEOUT = timedelta(minutes=5)
POPLAR = "poplar"
"""What torch.distributed calls the backend of `backend.py`."""
_ON_HOST = ("gloo", POPLAR)
"""Backends that send and receive tensors of the CPU, for a caller who is held up in the wait."""

Parts = tuple[tuple[int, ...], ...]
"""Global ranks by part, the same on all ranks."""

# Groups beside a process group cost sockets and threads: one of a kind, however many optimizers.
_PARTS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, Parts], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Members(Protocol):
    """Ranks that talk to each other, as one of them sees it: all that shared memory has to know."""

    @property
    def rank(self) -> int:
        """This one, among them."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def timeout(self) -> timedelta:
        """The deadline of every wait."""

    @property
    def failures(self) -> list[CollectiveTimeout]:
        """Collectives in shared memory that came to no end: ranks no longer agree on what comes
        next, so there are none after them.
        """

    @property
    def trace(self) -> Trace:
        """Notes every wait for others while somebody records."""

    def failure(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """The error of a collective in which some of them took no part."""


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one job as long as nobody joins or leaves; `epoch` counts such changes."""

    epoch: int
    ranks: tuple[int, ...]
    """Global ranks, in group order: `ranks[r]` is the global rank of group rank `r`."""
    store: torch._C._distributed_c10d.Store
    process_group: dist.ProcessGroup
    """Carries tensors: NCCL on CUDA, gloo or `cpu:poplar` on CPU."""
    control_group: dist.ProcessGroup
    """Carries small host values; on the CPU, so that agreeing never waits for a GPU stream."""
    timeout: timedelta
    number: int = 0
    """Of the groups made on this process group: keeps the messages of two optimizers apart."""
    failures: list[CollectiveTimeout] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    names: tuple[int, ...] | None = None
    """What errors call the ranks, where these are part of a larger group."""

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def is_on_host(self, device: torch.device) -> bool:
        """Whether its backend for tensors of a device is one of the CPU's."""
        return is_on_host(self.process_group, device)

    def carries(self, device: torch.device) -> bool:
        """Whether its backend for tensors of a device is made for them, as NCCL is for CUDA."""
        backend = _backends(self.process_group).get(device.type)
        return device.type == "cpu" or (backend is not None and backend not in _ON_HOST)

    def failure(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """As `Members.failure`."""
        names = self.names or range(self.size)
        return collective_timeout(
            names[self.rank], self.timeout, what, [names[peer] for peer in peers], cause
        )

    def part(self, parts: Sequence[Sequence[int]]) -> Group:
        """This rank's of the parts into which the ranks fall. Collective over all of them."""
        backend = dist.get_backend_config(self.process_group)
        members = tuple(tuple(self.ranks[rank] for rank in part) for part in parts)
        part = Group.of(_part(self.process_group, backend, members, self.timeout), self.timeout)
        names = next(tuple(part) for part in parts if self.rank in part)
        return replace(part, names=names, trace=self.trace)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Group:
        """Describe `process_group` (None: WORLD). Collective on its first use with NCCL.

        Raises:
            RuntimeError: torch.distributed is not initialised; that is the user's to do.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group() "
                "before building the optimizer and start the script with torchrun"
            )
        chosen = process_group if process_group is not None else dist.group.WORLD
        assert chosen is not None
        timeout = timeout if timeout is not None else DEFAULT_TIMEOUT
        return cls(
            epoch=0,
            ranks=tuple(dist.get_process_group_ranks(chosen)),
            store=_get_process_group_store(chosen),
            process_group=chosen,
            control_group=_control_group(chosen, timeout),
            timeout=timeout,
            number=_next_number(chosen),
        )


def collective_timeout(
    rank: int, timeout: timedelta, what: str, peers: Sequence[int], cause: str
) -> CollectiveTimeout:
    """Of one rank, which waited for `peers` until the deadline."""
    names = ", ".join(str(peer) for peer in peers)
    return CollectiveTimeout(
        f"rank {rank}: {what} failed, waiting for rank(s) {names} (deadline "
        f"{timeout.total_seconds():g} s). Look at the log of rank(s) {names} first: stopped, "
        "killed or far behind? A longer deadline: timeout=timedelta(...), of HeteroZeroOptimizer "
        f"or of init_process_group. Cause: {cause}"
    )


def is_on_host(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether waits for tensors of a device hold the caller up: its backend is one of the CPU's.

    A process group may have one for each device (`"cpu:gloo,cuda:nccl"`, which is the default).
    """
    return _backends(process_group).get(device.type) in _ON_HOST


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """By type of device."""
    parts = dist.get_backend_config(process_group).split(",")
    return dict(part.split(":", 1) for part in parts)


def _next_number(process_group: dist.ProcessGroup) -> int:
    """Counts the groups made on a process group, which all its ranks make in the same order."""
    number = _NUMBERS.get(process_group, 0)
    _NUMBERS[process_group] = number + 1
    return number


def _control_group(process_group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    if is_on_host(process_group, torch.device("cpu")):
        return process_group
    everybody = tuple(dist.get_process_group_ranks(process_group))
    return _part(process_group, "gloo", (everybody,), timeout)


def _part(
    process_group: dist.ProcessGroup, backend: str, parts: Parts, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group of this rank's part. Collective over the process group.

    Not by `dist.new_group`, which wants every rank of the job or else names the group by how many
    groups a rank has: ranks that have not as many wait for each other for ever, and after one was
    destroyed a name comes again, with the old addresses in the store. Here they agree on a new one.
    """
    known = _PARTS.setdefault(process_group, {})
    if (backend, parts) in known:
        return known[backend, parts]
    names = [uuid.uuid4().hex]
    first = dist.get_process_group_ranks(process_group)[0]
    dist.broadcast_object_list(names, src=first, group=process_group)
    rank = dist.get_rank()
    members = next(part for part in parts if rank in part)
    group, _ = _new_process_group_helper(
        len(members),
        members.index(rank),
        list(members),
        backend,
        _get_process_group_store(process_group),
        f"poplar/{names[0]}/{members[0]}",  # type: ignore[arg-type]  # a `GroupName`, since 2.11
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    known[backend, parts] = group
    return group
