"""Process groups within a process group, with names that all ranks agree on."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)

from poplar.comm.deadline import call_until, subgroup_timeout
from poplar.comm.failure_reports import FailureReports

Partition = tuple[tuple[int, ...], ...]
"""Global ranks by subgroup, the same on all ranks."""


class Subgroups:
    """The process groups that all ranks of a process group have made since they agreed on a name.

    A process group costs sockets and threads, so the groups of these ranks share its subgroups.
    After a failure none of them is used again: the ranks may not have made the same ones, and their
    connections may be closed (`close_when_aborted`).
    """

    def __init__(self, name: str = "") -> None:
        """`name`: used once, and the same on all ranks."""
        self.name = name
        self.is_closed = False
        self._made: dict[tuple[str, str, Partition], dist.ProcessGroup] = {}

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, name: str) -> Subgroups:
        """Those with this name: the last ones of this process group, or new ones."""
        last = _LAST.get(process_group)
        if last is None or last.name != name:
            last = _LAST[process_group] = cls(name)
        return last

    @staticmethod
    def usable(process_group: dist.ProcessGroup) -> str:
        """The name of those of this process group that can be used again; empty: none."""
        last = _LAST.get(process_group)
        return last.name if last is not None and not last.is_closed else ""

    def __iter__(self) -> Iterator[dist.ProcessGroup]:
        """Those that this rank has made."""
        return iter(list(self._made.values()))

    def close(self) -> None:
        """Let groups that are made from now on use other ones."""
        self.is_closed = True

    def make(
        self,
        process_group: dist.ProcessGroup,
        backend: str,
        partition: Partition,
        timeout: timedelta,
        reports: FailureReports | None = None,
    ) -> dist.ProcessGroup:
        """The process group of this rank's part of the partition. Collective on its first use.

        `dist.new_group` cannot be used. It needs every rank of the job, or it names the group after
        the number of groups that a rank has. Ranks with different numbers then wait for each other
        forever, and the name is reused after `destroy_process_group`, with old addresses in the
        store.

        Args:
            process_group: what the subgroups are part of: that of all ranks, or a subgroup.
            timeout: of this call and of waits in the subgroups.
            reports: of failures of other ranks, which end the call.

        Raises:
            RuntimeError: some ranks did not take part before the timeout, or one has failed.
        """
        key = process_group.group_name, backend, partition
        if key not in self._made:
            digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            name = f"poplar/{self.name}/{digest}"
            try:
                made = _make(process_group, backend, partition, name, timeout, reports)
            except BaseException:
                self.close()  # other ranks may have made it
                raise
            self._made[key] = made
        return self._made[key]


_LAST: weakref.WeakKeyDictionary[dist.ProcessGroup, Subgroups] = weakref.WeakKeyDictionary()
"""By process group."""


def _make(
    process_group: dist.ProcessGroup,
    backend: str,
    partition: Partition,
    name: str,
    timeout: timedelta,
    reports: FailureReports | None,
) -> dist.ProcessGroup:
    """As `Subgroups.make`; `name` is that of the whole partition."""
    rank = dist.get_rank()
    members = next(ranks for ranks in partition if rank in ranks)

    def make() -> Any:
        with _without_split():
            return _new_process_group_helper(
                len(members),
                members.index(rank),
                list(members),
                backend,
                _get_process_group_store(process_group),
                f"{name}/{members[0]}",  # type: ignore[arg-type]  # a `GroupName`, since 2.11
                timeout=subgroup_timeout(process_group, backend, timeout),
            )

    # In a thread: gloo waits for a rank that has ended for a time of its own.
    group, _ = call_until(make, timeout, reports)
    assert isinstance(group, dist.ProcessGroup)
    if backend != "gloo":
        group.bound_device_id = getattr(process_group, "bound_device_id", None)
    _world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
    return group


@contextmanager
def _without_split() -> Iterator[None]:
    """A context in which new groups on NCCL are not split off WORLD's communicator.

    torch does so if WORLD is bound to a device (`init_process_group(device_id=...)`). Every rank of
    the job would have to take part, also those outside the process group.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device
