"""Issued collectives of torch.distributed: on the host with a deadline, on devices on a stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from poplar.comm.failure_reports import WATCH_AFTER_SECONDS
from poplar.comm.group import Event, Group, on_device
from poplar.comm.host_buffers import record

# Once one peer has timed out, the others are only checked for whether they have finished.
_CHECK_TIMEOUT = timedelta(milliseconds=50)
_LOOK_SECONDS = 0.25
"""Interval at which a wait looks for failures that other ranks report."""


class ProcessGroupWork:
    """One collective made of several works on the host; each knows the peers that it waits for."""

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[tuple[dist.Work, Sequence[int]]]],
        *,
        what: str,
        peers: Sequence[int],
        before_wait: Callable[[], float] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Start the collective.

        Args:
            group: the participating ranks.
            start: issues the works; returns each with the peers (group ranks) that it needs.
            what: the collective's name in errors.
            peers: the peers that errors name if the collective cannot be started.
            before_wait: called first in `wait`; returns the seconds that it waited.
            finish: called once, when all works have finished.

        Raises:
            CollectiveTimeout: the collective cannot be started because a connection is closed.
        """
        self._group, self._what = group, what
        self._before_wait, self._finish = before_wait, finish
        group.check()
        try:
            self._works = list(start())
        except RuntimeError as error:
            raise group.fail(what, peers, error) from error

    def wait(self) -> float:
        """As `Work.wait`."""
        waited = self._before_wait() if self._before_wait is not None else 0.0
        start = time.perf_counter()
        self._wait_for_peers()
        waited += time.perf_counter() - start
        self._group.trace.add("wait", self._what, start)
        if self._finish is not None:
            self._finish()
        self._works, self._before_wait, self._finish = [], None, None
        return waited

    def _wait_for_peers(self) -> None:
        deadline = time.monotonic() + self._group.timeout.total_seconds()
        missing: set[int] = set()
        cause: RuntimeError | None = None
        for work, peers in self._works:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(left, _CHECK_TIMEOUT) if missing else left)
            except RuntimeError as error:
                missing.update(peers)
                cause = cause or error
        if missing:
            raise self._group.fail(self._what, sorted(missing), cause) from cause


def wait_for_all_ranks(group: Group, work: dist.Work, what: str) -> float:
    """Wait on the host for a native collective; returns the seconds waited.

    It ends early if another rank reports a failure.

    Raises:
        CollectiveTimeout: names the ranks that did not take part before the deadline.
    """
    start, is_done = time.monotonic(), work.get_future().done
    while not is_done():
        seconds = time.monotonic() - start
        left = group.timeout.total_seconds() - seconds
        if left <= 0 or group.sees_failure:
            raise group.fail(what, group.peers())
        if seconds > WATCH_AFTER_SECONDS and group.reports is not None:
            group.reports.watch()
        # A timeout of the wait raises, too.
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=min(left, _LOOK_SECONDS)))
    try:
        work.wait(group.timeout)  # it is over: this raises its error
    except RuntimeError as error:
        raise group.fail(what, group.peers(), error) from error
    return time.monotonic() - start


class StreamWork:
    """Native collectives of device tensors. A wait blocks the current stream, never the host.

    If other ranks are missing, so does the stream. The host finds out in an exchange of the control
    channel, in `Group.wait_for_event`, or by `Group.abort_late_collectives`.
    """

    __slots__ = ("_device", "_finish", "_group", "_issued", "_start")

    def __init__(
        self,
        group: Group,
        start: Callable[[], Sequence[dist.Work | None]],
        device: torch.device,
        what: str,
        finish: Callable[[], None] | None,
    ) -> None:
        """Issue the works.

        Args:
            group: the participating ranks.
            start: issues them. It is kept until the wait, with the tensors that it refers to: the
                backend must not lose their memory, and calls no `record_stream`.
            device: of the tensors.
            what: the collective's name in errors.
            finish: called once, in the wait.

        Raises:
            CollectiveTimeout: the collectives cannot be issued because they have been aborted.
        """
        self._start: Callable[[], Sequence[dist.Work | None]] | None = start
        self._group, self._device, self._finish = group, device, finish
        group.check()
        try:
            self._issued = _Issued(what, device, start())
        except RuntimeError as error:
            raise group.fail(what, group.peers(), error) from error
        group.devices.add(device)
        group.in_flight[id(self._issued)] = self._issued, time.monotonic()

    def wait(self) -> float:
        """As `Work.wait`; 0, because the host does not wait."""
        issued = self._issued
        try:
            for work in issued.works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise self._group.fail(issued.what, self._group.peers(), error) from error
        # A work refers to its tensors. So the device's progress is seen by an event from now on.
        issued.passed = record(self._device) if self._group.reports is not None else None
        if self._finish is not None:
            self._finish()
        self._drop_tensors()
        return 0.0

    def _drop_tensors(self) -> None:
        if self._issued.passed is None:
            self._group.in_flight.pop(id(self._issued), None)
        self._issued.works, self._start, self._finish = (), None, None

    def __del__(self) -> None:
        if hasattr(self, "_issued"):  # the collectives of an abandoned step are not waited for
            self._drop_tensors()


@dataclass(slots=True)
class _Issued:
    """Works that have been issued together."""

    what: str
    device: torch.device
    works: Sequence[dist.Work | None]
    """Empty once they have been waited for."""
    passed: Event | None = None
    """After the wait of a stream."""

    def is_completed(self) -> bool:
        """Whether the device has finished all of them; called from another thread."""
        works = self.works  # before `passed`, which is set before they are dropped
        with on_device(self.device):
            if self.passed is not None:
                return self.passed.query()
            return all(work is None or work.is_completed() for work in works)
