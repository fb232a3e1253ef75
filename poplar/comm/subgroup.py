"""Process groups within a process group, with names that all ranks agree on."""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)

from poplar.comm.deadline import subgroup_timeout, wait_until
from poplar.comm.failure_reports import FailureReports, call_in_thread

T = TypeVar("T")
Partition = tuple[tuple[int, ...], ...]
"""Global ranks by subgroup, the same on all ranks."""

# A process group costs sockets and threads, so optimizers share the subgroups of a process group.
_SUBGROUPS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, Partition], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def subgroup(
    process_group: dist.ProcessGroup,
    backend: str,
    partition: Partition,
    timeout: timedelta,
    reports: FailureReports | None = None,
) -> dist.ProcessGroup:
    """The process group of this rank's part of the partition. Collective over `process_group`.

    `dist.new_group` cannot be used. It needs every rank of the job, or it names the group after the
    number of groups that a rank has. Ranks with different numbers then wait for each other forever,
    and the name is reused after `destroy_process_group`, with old addresses in the store. This
    function makes the ranks agree on a unique name.

    Args:
        process_group: what the subgroups are part of.
        backend: of the subgroups.
        partition: the ranks of all subgroups.
        timeout: of this call and of waits in the subgroups.
        reports: of failures of other ranks, which end the call.

    Raises:
        RuntimeError: some ranks did not take part before the timeout, or one has failed.
    """
    began = time.monotonic()
    known = _SUBGROUPS.setdefault(process_group, {})
    if (backend, partition) in known:
        return known[backend, partition]
    name = _agree_on_name(process_group, timeout, reports)
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
                f"poplar/{name}/{members[0]}",  # type: ignore[arg-type]  # a `GroupName`, since 2.11
                timeout=subgroup_timeout(process_group, backend, timeout),
            )

    # In a thread: gloo waits for a rank that has ended for a time of its own.
    answers = call_in_thread(make)
    left = timeout - timedelta(seconds=time.monotonic() - began)
    wait_until(lambda: not answers.empty(), left, reports)
    made, error = answers.get()
    if error is not None:
        raise error
    assert made is not None
    group, _ = made
    assert isinstance(group, dist.ProcessGroup)
    if backend != "gloo":
        group.bound_device_id = getattr(process_group, "bound_device_id", None)
    _world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
    known[backend, partition] = group
    return group


def forget_closed(process_group: dist.ProcessGroup) -> None:
    """Let the next use of a process group make new subgroups on gloo: see `close_when_aborted`."""
    known = _SUBGROUPS.get(process_group, {})
    for key in [key for key in known if key[0] == "gloo"]:
        del known[key]


def subgroups_of(process_group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """The subgroups that this rank has created."""
    yield from _SUBGROUPS.get(process_group, {}).values()


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


def _agree_on_name(
    process_group: dist.ProcessGroup, timeout: timedelta, reports: FailureReports | None
) -> str:
    """A random name, chosen by the first rank. Collective."""
    backends = [part.split(":")[0] for part in dist.get_backend_config(process_group).split(",")]
    device = torch.device("cpu")
    if "cpu" not in backends:  # the bound device, because the current one may be another
        device = getattr(process_group, "bound_device_id", None) or torch.device(backends[0])
    name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8).to(device)
    work = dist.broadcast(name, group=process_group, group_src=0, async_op=True)
    if work is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not in the process group")
    # Polled: the timeout of the process group may be longer, and NCCL would not block here.
    is_done = work.get_future().done if device.type == "cpu" else work.is_completed
    wait_until(is_done, timeout, reports)
    work.wait()
    return bytes(name.tolist()).hex()
