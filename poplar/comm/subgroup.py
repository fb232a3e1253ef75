"""Process groups within a process group, with names that all ranks agree on."""

from __future__ import annotations

import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _new_process_group_helper,
    _world,
)

from poplar.comm.deadline import subgroup_timeout
from poplar.comm.failure_reports import WATCH_AFTER_SECONDS, FailureReports

T = TypeVar("T")
Partition = tuple[tuple[int, ...], ...]
"""Global ranks by subgroup, the same on all ranks."""

_POLL_SECONDS = 0.001

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
    wait = _Wait(timeout, reports)
    known = _SUBGROUPS.setdefault(process_group, {})
    if (backend, partition) in known:
        return known[backend, partition]
    name = _agree_on_name(process_group, wait)
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

    group, _ = _call(make, wait)
    assert isinstance(group, dist.ProcessGroup)
    if backend != "gloo":
        group.bound_device_id = getattr(process_group, "bound_device_id", None)
    _world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(members)}
    known[backend, partition] = group
    return group


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


class _Wait:
    """Waits up to one deadline for other ranks, unless one of them reports a failure."""

    def __init__(self, timeout: timedelta, reports: FailureReports | None = None) -> None:
        self._began, self._seconds, self._reports = (
            time.monotonic(),
            timeout.total_seconds(),
            reports,
        )

    def until(self, is_done: Callable[[], bool]) -> None:
        """Return once it is done.

        Raises:
            RuntimeError: it is not done before the deadline, or a rank has failed.
        """
        while not is_done():
            seconds = time.monotonic() - self._began
            if seconds > self._seconds:
                raise RuntimeError("no answer")
            if self._reports is not None and seconds > WATCH_AFTER_SECONDS:
                self._reports.watch()
                if self._reports.seen.is_set():
                    raise RuntimeError("another rank reported a failure")
            time.sleep(_POLL_SECONDS)


def _call(call: Callable[[], T], wait: _Wait) -> T:
    """The result of a call in a thread, which goes on in vain after the wait.

    gloo waits for a rank that has ended for a time of its own.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    wait.until(lambda: not answers.empty())
    value, error = answers.get()
    if error is not None:
        raise error
    return cast("T", value)


def _agree_on_name(process_group: dist.ProcessGroup, wait: _Wait) -> str:
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
    wait.until(is_done)
    work.wait()
    return bytes(name.tolist()).hex()
