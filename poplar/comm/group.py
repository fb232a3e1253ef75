"""A process group with a deadline: ranks, waits, and what happens when a collective fails."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from poplar.comm.deadline import NoAnswer, deadline_of, wait_until
from poplar.comm.failure_reports import FailureReports
from poplar.comm.formation import Formation
from poplar.comm.subgroup import Subgroups
from poplar.system.trace import Trace
from poplar.values.errors import CollectiveTimeout

T = TypeVar("T")

_HOST_BACKEND = "gloo"
"""Sends and receives CPU tensors; a wait blocks the calling thread."""
_HOST_EXTRA_TIMEOUT = timedelta(seconds=2)
"""A rank that waits for another host must time out first, and notify the ranks of its host."""
_ABORT_SECONDS = 10.0
"""Time for the backends of devices to abort what is pending."""
_ADVICE = (
    "If the process of no rank has ended, gloo may not reach the other hosts: set "
    "GLOO_SOCKET_IFNAME to the network interface of each host"
)
"""What to check if the ranks cannot make the control channel."""

# Every optimizer makes a group of its own, and may split it.
_GROUP_COUNTS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

_REPORTED = "another rank reported a failure"
"""Why connections were closed, until this rank knows the failure."""
# Why the connections of a process group were closed, for all groups on it: gloo and NCCL cannot
# cancel a single message or collective.
_CLOSED: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class Event(Protocol):
    """An event of a device's stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """A context for threads other than the caller's that query or abort work of a device.

    The current device of a new thread is 0. A call of CUDA would make a context there, of 0.5 GiB.
    """
    is_cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if is_cuda else contextlib.nullcontext()


@dataclass(slots=True)
class DeviceWork:
    """A collective that has been issued on a device."""

    what: str
    """Its name in errors."""
    device: torch.device
    work: dist.Work | None
    """None once it has been waited for."""
    passed: Event | None = None
    """After the wait of a stream."""

    def is_completed(self) -> bool:
        """Whether the device has finished it; called from any thread."""
        work = self.work  # before `passed`, which is set before the work is dropped
        with on_device(self.device):
            if self.passed is not None:
                return self.passed.query()
            return work is None or work.is_completed()


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks of one process group."""

    ranks: tuple[int, ...]
    """Global ranks, in group order: `ranks[r]` is the global rank of group rank `r`."""
    process_group: dist.ProcessGroup
    """Carries tensors: NCCL on CUDA, gloo on the CPU."""
    control_group: dist.ProcessGroup
    """Carries small host values on the CPU, so that it never waits for a GPU stream."""
    timeout: timedelta
    index: int = 0
    """Counts the groups of this process group; separates the messages of two optimizers."""
    subgroups: Subgroups = field(default_factory=Subgroups)
    """The process groups that this group and others of the same ranks have made."""
    failures: list[CollectiveTimeout] = field(default_factory=list)
    """Collectives that did not finish. If there are any, ranks no longer agree on the collective
    order, and every later collective raises."""
    trace: Trace = field(default_factory=Trace)
    """Records every wait for other ranks while tracing is on."""
    names: tuple[int, ...] = ()
    """By group rank, the number of the rank in all that users see. Default: the same number. In a
    part of a larger group, such as the ranks of a host, it is the number there."""
    job_ranks: tuple[int, ...] = ()
    """The global ranks, by the numbers that users see."""
    reports: FailureReports | None = None
    """The failures of all ranks, by their numbers in errors; None: there is no store."""
    in_flight: dict[int, tuple[DeviceWork, float]] = field(default_factory=dict)
    """Collectives on devices, with the time of their issue. Those that the device has finished are
    removed by `abort_late_collectives`."""
    devices: set[torch.device] = field(default_factory=set)
    """Where collectives have been issued."""
    on_abort: dict[Any, Callable[[], None]] = field(default_factory=dict)
    """What `abort` calls so that peers that wait for this rank raise at once."""
    _process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(range(self.size)))
            object.__setattr__(self, "job_ranks", self.ranks)

    @cached_property
    def rank(self) -> int:
        """This rank, in the group."""
        return self.ranks.index(dist.get_rank())

    @property
    def name(self) -> int:
        """This rank's number in all that users see; see `names`."""
        return self.names[self.rank]

    def by_name(self, values: Sequence[T]) -> dict[int, T]:
        """Values by group rank as values by the numbers that users see."""
        return dict(zip(self.names, values, strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def _backends(self) -> dict[str, str]:
        """The process group's backends by device type."""
        return _backends(self.process_group)

    @property
    def default_device(self) -> torch.device:
        """The current CUDA device if the process group has a backend for it, else the CPU."""
        if self.has_device_backend and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def backend_for(self, device: torch.device) -> str | None:
        """The name of the backend for tensors of this device; None: there is none."""
        return self._backends.get(device.type)

    def is_on_host(self, device: torch.device) -> bool:
        """Whether the backend for tensors of this device is a CPU backend."""
        return self.backend_for(device) == _HOST_BACKEND

    def supports(self, device: torch.device) -> bool:
        """Whether the backend for this device is made for its tensors, as NCCL is for CUDA."""
        return device.type == "cpu" or self.backend_for(device) not in (None, _HOST_BACKEND)

    def report(self, reason: str, *, is_cause: bool = False) -> None:
        """Report that a collective of this rank has failed to ranks that share no memory."""
        if self.reports is not None:
            self.reports.publish(reason, is_cause=is_cause)

    def timeout_error(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """The error of a collective in which `peers` did not take part."""
        return self._timeout(what, [self.names[peer] for peer in peers], cause)

    def _timeout(self, what: str, peers: Sequence[int], cause: str) -> CollectiveTimeout:
        """As `timeout_error`, by the numbers that users see."""
        names = ", ".join(map(self._shown, peers))
        return CollectiveTimeout(
            f"rank {self.name}: {what} failed, waiting for rank(s) {names} (deadline "
            f"{self.timeout.total_seconds():g} s). Check the log of rank(s) {names}: the process "
            "may have been stopped or killed, or be slow. To wait longer, pass a longer timeout= "
            "to what built the optimizer or made this call, and a longer one still to "
            f"init_process_group. Cause: {cause}"
        )

    def _shown(self, name: int) -> str:
        """A rank in a timeout: launchers name the logs after the rank in the job."""
        rank = self.job_ranks[name]
        return f"{name}" if rank == name else f"{name} ({rank} of the job)"

    @property
    def has_device_backend(self) -> bool:
        """Whether tensors of some device do not go through the host."""
        return any(backend != _HOST_BACKEND for backend in self._backends.values())

    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def fail(
        self, what: str, peers: Sequence[int], cause: Exception | str | None = None
    ) -> CollectiveTimeout:
        """The error of a collective that this rank cannot finish. No later one can be issued.

        The ranks find out, through the store, which of them are missing. Collectives that are
        pending on devices are aborted, so that their streams continue.

        Args:
            cause: the backend's error; None: no answer before the deadline.
        """
        if self.failures:
            return self.failures[0]
        ranks, reason = [self.names[peer] for peer in peers], first_line(cause)
        closed = [_CLOSED[used] for used in self._connections() if used in _CLOSED]
        if closed and isinstance(cause, RuntimeError) and not self.sees_failure:
            failure = self._failure_of_another(closed[0])
        else:
            if self.reports is not None:
                ranks, reason = self.reports.diagnose(ranks, reason, what)
            failure = self._timeout(what, ranks, reason)
        self.report(str(failure))
        self.note_failure(failure)
        self.abort_device_collectives()
        return failure

    def note_failure(self, failure: CollectiveTimeout) -> None:
        """Refuse all later collectives, for this reason. Another group may be made instead."""
        self.failures.append(failure)
        self.subgroups.close()

    def _connections(self) -> set[dist.ProcessGroup]:
        """The process groups whose connections `abort` closes."""
        on_host = {group for group in self.on_abort if isinstance(group, dist.ProcessGroup)}
        return on_host | self._device_groups()

    def _device_groups(self) -> set[dist.ProcessGroup]:
        """The process groups that may have work pending on devices."""
        return {self.process_group, *self.subgroups} if self.has_device_backend else set()

    def _note_closed(self, groups: set[dist.ProcessGroup]) -> None:
        reason = str(self.failures[0]) if self.failures else _REPORTED
        for group in groups:
            if _CLOSED.get(group, _REPORTED) == _REPORTED:
                _CLOSED[group] = reason

    def _failure_of_another(self, reason: str) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"rank {self.name}: another optimizer or call on the same process group failed, which "
            "closed the connections that they share. Initialize torch.distributed again, or "
            "restart from a checkpoint. Optimizers that should outlive each other's failures each "
            "need process_group=torch.distributed.new_group(...). The other one's error: "
            f"{reason}"
        )

    def abort(self, reason: str) -> None:
        """Call if this rank fails in a way that the others cannot survive; they raise `reason`."""
        if os.getpid() != self._process:
            return
        if not self.failures:
            self.note_failure(CollectiveTimeout(reason))
            self.report(reason, is_cause=True)
            self.abort_device_collectives()
        for stop in list(self.on_abort.values()):
            stop()
        self._note_closed(self._connections())

    def check(self) -> None:
        """Call before a collective is issued and before a result of the device is used.

        Raises:
            CollectiveTimeout: an earlier collective did not finish, on any rank, or another group
                has failed that shares the connections.
            RuntimeError: in a process that was forked from a rank.
        """
        check_process(self._process, self.name)
        if self.failures:
            is_closed = self.has_device_backend or self.process_group in self.on_abort
            again = "initialize torch.distributed again and " if is_closed else ""
            raise CollectiveTimeout(
                f"rank {self.name}: an earlier collective did not finish, so the ranks no longer "
                f"agree on the collective order; {again}build the optimizer again on all ranks, or "
                f"restart from a checkpoint. The earlier error: {self.failures[0]}"
            )
        if self.sees_failure:
            raise self.fail("a collective", self.peers(), "another rank reported a failure")
        if self.process_group in _CLOSED and self.process_group in self._connections():
            raise self._failure_of_another(_CLOSED[self.process_group])

    @property
    def sees_failure(self) -> bool:
        """Whether a rank has reported a failure since `reports.watch` was called."""
        return self.reports is not None and self.reports.seen.is_set()

    def wait_for_event(self, event: Event, what: str) -> float:
        """Wait on the host until the device has reached an event; returns the seconds waited.

        Raises:
            CollectiveTimeout: the device did not reach it before the deadline, because it waits for
                other ranks, or one of them reported a failure.
        """
        self.check()
        try:
            waited = wait_until(event.query, self.timeout, self.reports)
        except NoAnswer as error:
            raise self.fail(what, self.peers()) from error
        self.check()  # an event is also reached after an abort, with any values
        return waited

    def abort_device_collectives(self) -> None:
        """Abort what is pending on devices, so that their streams continue with any values.

        NCCL may need all communicators of a device to be aborted at the same time.
        """
        groups = self._device_groups()
        self._note_closed(groups)
        threads = [
            threading.Thread(target=_abort, args=(group, set(self.devices)), daemon=True)
            for group in groups
        ]
        deadline = time.monotonic() + _ABORT_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def follow_failure(self) -> None:
        """Abort what is pending on devices because another rank has reported a failure.

        Called in a thread of its own, as `abort_late_collectives`. A rank that waits for others
        reports this first, so that it is not taken for the cause.
        """
        waits = any(not work.is_completed() for work, _ in list(self.in_flight.values()))
        if waits and not self.failures:
            self.report(f"rank {self.name} waited for other ranks")
        self.abort_device_collectives()

    def abort_late_collectives(self) -> None:
        """Fail if the device has not finished a collective before its deadline.

        Called in a thread of its own: the host may be blocked, in a read of the device or because
        the device's queue is full. It raises as soon as it checks for failures.
        """
        issued_before = time.monotonic() - self.timeout.total_seconds()
        for number, (work, issued) in list(self.in_flight.items()):
            if work.is_completed():
                # Also if it failed, with an error of the network. Then a stream that waits stops.
                if work.passed is not None:
                    self.in_flight.pop(number, None)
            elif issued < issued_before and not self.failures:
                self.fail(work.what, self.peers())

    def on_host(self, members: Sequence[int]) -> Group:
        """The ranks of this rank's host as a group that shares memory. Local.

        Args:
            members: group ranks; errors go on to name them so.
        """
        return replace(
            self,
            ranks=tuple(self.ranks[rank] for rank in members),
            names=tuple(self.names[rank] for rank in members),
            timeout=self.timeout + _HOST_EXTRA_TIMEOUT,
        )

    def split(self, partition: Sequence[Sequence[int]]) -> Group:
        """The subgroup of this rank. Collective over all ranks.

        Args:
            partition: group ranks by subgroup, the same on all ranks.
        """
        backend = dist.get_backend_config(self.process_group)
        subgroups = tuple(tuple(self.ranks[rank] for rank in ranks) for ranks in partition)
        members = next(tuple(ranks) for ranks in partition if self.rank in ranks)
        try:
            process_group = self.subgroups.make(
                self.process_group, backend, subgroups, self.timeout, self.reports
            )
            control_group = self._control_group_of(process_group)
        except RuntimeError as error:
            raise self.fail("making the process groups of hosts", self.peers(), error) from error
        return replace(
            self,
            ranks=tuple(self.ranks[rank] for rank in members),
            process_group=process_group,
            control_group=control_group,
            index=_next_index(process_group),
            names=tuple(self.names[rank] for rank in members),
        )

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        timeout: timedelta | None,
        outer: Sequence[Group] = (),
    ) -> Group:
        """The group of `process_group` (None: WORLD). Collective.

        Args:
            timeout: of its collectives; None: that of the process group.
            outer: the groups of the calls that it is made in. A rank that fails there is a cause
                of failures here.

        Raises:
            RuntimeError: torch.distributed is not initialized; Poplar never does that itself.
            ValueError: this rank is not in the process group, or the timeout is not valid.
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group() "
                "first, and start the script with torchrun"
            )
        chosen = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(chosen, dist.ProcessGroup):
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group; only the ranks of the group may "
                "make this call, so skip it on the others"
            )
        rank, ranks = dist.get_rank(chosen), tuple(dist.get_process_group_ranks(chosen))
        formation: Formation | None = None
        try:
            formation = Formation(chosen, Subgroups.usable(chosen))
            prefixes = [
                prefix
                for group in outer
                if group.process_group is chosen and group.reports is not None
                for prefix in group.reports.prefixes
            ]
            reports = _reports(chosen, formation.name, list(dict.fromkeys(prefixes)))
            group = cls(ranks, chosen, chosen, deadline_of(chosen, timeout), reports=reports)
            return group._formed(formation)._with_control_group()
        except CollectiveTimeout:
            raise  # other ranks wait for the same ones, or they have been told
        except BaseException as error:
            if len(ranks) > 1:
                reason = f"rank {rank} failed in making its group: {type(error).__name__}: {error}"
                (formation or Formation(chosen)).fail(reason)
            raise

    def _formed(self, formation: Formation) -> Group:
        """This group with its number, once all ranks make it. Collective."""
        try:
            formed = formation.wait(self.timeout, self.reports)
        except RuntimeError as error:
            missing = formation.leave() or self.peers()
            causes = self.reports.causes() if self.reports is not None else {}
            reason = "; ".join(causes.values()) or first_line(error)
            raise self.timeout_error("making a group", [*causes] or missing, reason) from error
        # A rank that fails before it knows the number reports under the name of the attempt.
        outer = self.reports.prefixes if self.reports is not None else ()
        return replace(
            self,
            index=formed.index,
            subgroups=Subgroups.of(self.process_group, formed.subgroups),
            reports=_reports(self.process_group, str(formed.index), outer),
        )

    def _with_control_group(self) -> Group:
        """This group with a control group of its own. Collective."""
        try:
            control_group = self._control_group_of(self.process_group)
        except RuntimeError as error:
            cause = f"{first_line(error)}. {_ADVICE}"
            raise self.fail("making the control channel", self.peers(), cause) from error
        # The reports that were watched meanwhile notify nobody.
        outer = self.reports.prefixes[1:] if self.reports is not None else ()
        group = replace(
            self,
            control_group=control_group,
            reports=_reports(self.process_group, str(self.index), outer),
        )
        if group.has_device_backend and group.reports is not None:
            group.reports.watch(group.follow_failure, group.abort_late_collectives)
        return group

    def _control_group_of(self, process_group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A gloo group of the same ranks. Collective on the first use of a process group.

        It is never the process group itself: the user's own collectives there may be issued in
        another order, relative to those of the control channel, on every rank.
        """
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if len(ranks) == 1:
            return process_group
        return self.subgroups.make(process_group, "gloo", (ranks,), self.timeout, self.reports)


def _reports(
    process_group: dist.ProcessGroup, name: str, outer: Sequence[str]
) -> FailureReports | None:
    """The reports of the group with this name in a process group."""
    if process_group.size() == 1:
        return None
    return FailureReports.of(process_group, name, outer)


def check_process(process: int, rank: int) -> None:
    """Raise if this is not the process that made a rank's group, but a fork of it."""
    if os.getpid() != process:
        raise RuntimeError(
            f"rank {rank}: process {os.getpid()} was forked from the rank's process {process}, and "
            "only that one may call the optimizer: the two would answer for one rank. Compute in "
            "the parent, or give the forked process its own model"
        )


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """The backends by device type."""
    parts = dist.get_backend_config(process_group).split(",")
    return dict(part.split(":", 1) for part in parts)


def _abort(process_group: dist.ProcessGroup, devices: set[torch.device]) -> None:
    # Aborted already, or not in time.
    with on_device(next(iter(devices), None)), contextlib.suppress(RuntimeError):
        process_group.abort()


def first_line(cause: Exception | str | None) -> str:
    """The first line of an error; without one, there was no answer."""
    return str(cause or "").partition("\n")[0] or "no answer"


def _next_index(process_group: dist.ProcessGroup) -> int:
    """Counts the groups on a subgroup; all its ranks create them in the same order."""
    index = _GROUP_COUNTS.get(process_group, 0)
    _GROUP_COUNTS[process_group] = index + 1
    return index
