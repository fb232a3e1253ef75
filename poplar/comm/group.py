"""Process groups: the only module that knows ranks, world size, deadlines and torch's groups."""

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
"""The name of the backend in `torch_backend`."""
_HOST_BACKENDS = ("gloo", POPLAR)
"""Backends that send and receive CPU tensors; a wait blocks the calling thread."""

Partition = tuple[tuple[int, ...], ...]
"""Global ranks by subgroup, the same on all ranks."""

# A process group costs sockets and threads, so optimizers share the subgroups of a process group.
_SUBGROUPS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, Partition], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
_GROUP_COUNTS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class RankGroup(Protocol):
    """A group as one of its ranks sees it; all that the shared-memory transport depends on."""

    @property
    def rank(self) -> int:
        """This rank, in the group."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def timeout(self) -> timedelta:
        """The deadline of every wait."""

    @property
    def failures(self) -> list[CollectiveTimeout]:
        """Shared-memory collectives that did not finish. If there are any, ranks no longer agree
        on the collective order, and every later collective raises.
        """

    @property
    def trace(self) -> Trace:
        """Records every wait for other ranks while tracing is on."""

    def timeout_error(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """The error of a collective in which `peers` did not take part."""


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one process group."""

    ranks: tuple[int, ...]
    """Global ranks, in group order: `ranks[r]` is the global rank of group rank `r`."""
    process_group: dist.ProcessGroup
    """Carries tensors: NCCL on CUDA, gloo or `cpu:poplar` on CPU."""
    control_group: dist.ProcessGroup
    """Carries small host values on the CPU, so that it never waits for a GPU stream."""
    timeout: timedelta
    index: int = 0
    """Counts the groups of this process group; separates the messages of two optimizers."""
    failures: list[CollectiveTimeout] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    names: tuple[int, ...] | None = None
    """The ranks' numbers in errors, if this group is part of a larger one."""

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The process group's backends by device type."""
        return _backends(self.process_group)

    def is_on_host(self, device: torch.device) -> bool:
        """Whether the backend for tensors of this device is a CPU backend."""
        return self._backends.get(device.type) in _HOST_BACKENDS

    def supports(self, device: torch.device) -> bool:
        """Whether the backend for this device is made for its tensors, as NCCL is for CUDA."""
        backend = self._backends.get(device.type)
        return device.type == "cpu" or (backend is not None and backend not in _HOST_BACKENDS)

    def timeout_error(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """As `RankGroup.timeout_error`."""
        names = self.names or range(self.size)
        return collective_timeout(
            names[self.rank], self.timeout, what, [names[peer] for peer in peers], cause
        )

    def split(self, partition: Sequence[Sequence[int]]) -> Group:
        """The subgroup of this rank. Collective over all ranks.

        Args:
            partition: group ranks by subgroup, the same on all ranks.
        """
        backend = dist.get_backend_config(self.process_group)
        subgroups = tuple(tuple(self.ranks[rank] for rank in ranks) for ranks in partition)
        process_group = _subgroup(self.process_group, backend, subgroups, self.timeout)
        names = next(tuple(ranks) for ranks in partition if self.rank in ranks)
        return replace(Group.of(process_group, self.timeout), names=names, trace=self.trace)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Group:
        """The group of `process_group` (None: WORLD). Collective on its first use with NCCL.

        Raises:
            RuntimeError: torch.distributed is not initialized; Poplar never does that itself.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group() "
                "before building the optimizer and start the script with torchrun"
            )
        chosen = process_group if process_group is not None else dist.group.WORLD
        assert chosen is not None
        timeout = timeout if timeout is not None else DEFAULT_TIMEOUT
        return cls(
            ranks=tuple(dist.get_process_group_ranks(chosen)),
            process_group=chosen,
            control_group=_control_group(chosen, timeout),
            timeout=timeout,
            index=_next_index(chosen),
        )


def collective_timeout(
    rank: int, timeout: timedelta, what: str, peers: Sequence[int], cause: str
) -> CollectiveTimeout:
    """The error of `rank`, which waited for `peers` until the deadline."""
    names = ", ".join(str(peer) for peer in peers)
    return CollectiveTimeout(
        f"rank {rank}: {what} failed, waiting for rank(s) {names} (deadline "
        f"{timeout.total_seconds():g} s). Check the log of rank(s) {names}: the process may have "
        "been stopped or killed, or be slow. To wait longer, pass timeout=timedelta(...) to "
        f"HeteroZeroOptimizer or init_process_group. Cause: {cause}"
    )


def is_on_host(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend for tensors of this device is a CPU backend, whose waits block the host.

    A process group may have one backend per device (`"cpu:gloo,cuda:nccl"` is torch's default).
    """
    return _backends(process_group).get(device.type) in _HOST_BACKENDS


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """The backends by device type."""
    parts = dist.get_backend_config(process_group).split(",")
    return dict(part.split(":", 1) for part in parts)


def _next_index(process_group: dist.ProcessGroup) -> int:
    """Counts the groups of a process group; all its ranks create them in the same order."""
    index = _GROUP_COUNTS.get(process_group, 0)
    _GROUP_COUNTS[process_group] = index + 1
    return index


def _control_group(process_group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    if is_on_host(process_group, torch.device("cpu")):
        return process_group
    all_ranks = tuple(dist.get_process_group_ranks(process_group))
    return _subgroup(process_group, "gloo", (all_ranks,), timeout)


def _subgroup(
    process_group: dist.ProcessGroup, backend: str, partition: Partition, timeout: timedelta
) -> dist.ProcessGroup:
    """The process group of this rank's part of the partition. Collective over `process_group`.

    `dist.new_group` cannot be used. It needs every rank of the job, or it names the group after the
    number of groups that a rank has. Ranks with different numbers then wait for each other forever,
    and the name is reused after `destroy_process_group`, with old addresses in the store. This
    function makes the ranks agree on a unique name.
    """
    known = _SUBGROUPS.setdefault(process_group, {})
    if (backend, partition) in known:
        return known[backend, partition]
    names = [uuid.uuid4().hex]
    first = dist.get_process_group_ranks(process_group)[0]
    dist.broadcast_object_list(names, src=first, group=process_group)
    rank = dist.get_rank()
    members = next(ranks for ranks in partition if rank in ranks)
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
    _world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
    known[backend, partition] = group
    return group
