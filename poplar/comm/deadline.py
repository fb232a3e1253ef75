"""Waits with a deadline, which comes before that of torch's watchdog."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from poplar.comm.failure_reports import FailureReports, call_in_thread

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=5)
WATCHDOG_MARGIN = timedelta(minutes=2)
"""Time for Poplar to report a failure and to abort what is pending on devices. After the timeout of
a process group of devices, torch's watchdog ends the process instead."""
_LONGEST = timedelta(days=36_500)
"""torch counts nanoseconds from the start of the system in 64 bits."""

_WATCH_AFTER_SECONDS = 0.25
"""Longer waits look for failures that other ranks report, about as often."""
_QUERY_SECONDS = (2e-5, 1e-3)
"""The first and the longest interval between two queries."""


class NoAnswer(RuntimeError):
    """Other ranks did not answer before the deadline, or one of them reported a failure."""


def wait_until(
    is_done: Callable[[], bool],
    timeout: timedelta,
    reports: FailureReports | None,
    pause: Callable[[float], object] | None = None,
) -> float:
    """Wait on the host for something that needs other ranks; returns the seconds waited.

    Args:
        reports: of failures of all ranks, if there are any.
        pause: waits up to so many seconds, and ends as soon as it is over; None: sleep, and query.

    Raises:
        NoAnswer: it is not over before the deadline, or a rank has reported a failure.
    """
    start, interval = time.monotonic(), _QUERY_SECONDS[0]
    while not is_done():
        seconds = time.monotonic() - start
        left = timeout.total_seconds() - seconds
        if left <= 0:
            raise NoAnswer("no answer")
        if reports is not None:
            if seconds > _WATCH_AFTER_SECONDS:
                reports.watch()
            if reports.seen.is_set():
                raise NoAnswer("another rank reported a failure")
        if pause is not None:
            pause(min(left, _WATCH_AFTER_SECONDS))
        else:
            time.sleep(interval)
            interval = min(2 * interval, _QUERY_SECONDS[1])
    return time.monotonic() - start


def call_until(call: Callable[[], T], timeout: timedelta, reports: FailureReports | None) -> T:
    """The result of a call that may block, in another thread; its errors are raised.

    Raises:
        NoAnswer: as `wait_until`; the call then goes on in vain.
    """
    answers = call_in_thread(call)
    wait_until(lambda: not answers.empty(), timeout, reports)
    value, error = answers.get()
    if error is not None:
        raise error
    return cast("T", value)


def deadline_of(process_group: dist.ProcessGroup, given: timedelta | None) -> timedelta:
    """How long waits of a group on this process group last.

    Args:
        process_group: torch's own timeout counts if its watchdog looks after it.
        given: by the caller; None: 5 minutes, or shorter, to end before the process group's.

    Raises:
        ValueError: it is not positive, too long, or not shorter than the process group's.
    """
    if given is None:
        return deadline_within(process_group, DEFAULT_TIMEOUT)
    if not timedelta(0) < given <= _LONGEST:
        raise ValueError(
            f"timeout must be positive and at most {_LONGEST.days} days, got {given}; the default "
            f"is {DEFAULT_TIMEOUT}"
        )
    watchdog = _watchdog_timeout(process_group)
    if watchdog is not None and given >= watchdog:
        raise ValueError(
            f"timeout={given} must be shorter than the timeout of the process group ({watchdog}), "
            "after which torch's watchdog ends the process. Pass a timeout of at least "
            f"{given + WATCHDOG_MARGIN} to init_process_group, or a shorter one here"
        )
    return given


def deadline_within(process_group: dist.ProcessGroup, wanted: timedelta) -> timedelta:
    """The wanted deadline, or a shorter one that ends before the process group's timeout."""
    watchdog = _watchdog_timeout(process_group)
    if watchdog is None:
        return wanted
    return min(wanted, max(watchdog - WATCHDOG_MARGIN, watchdog / 2))


def subgroup_timeout(
    process_group: dist.ProcessGroup, backend: str, deadline: timedelta
) -> timedelta:
    """The timeout of a subgroup, which later groups with other deadlines use too."""
    if backend == "gloo":
        return deadline
    own = _watchdog_timeout(process_group)
    return max(deadline + WATCHDOG_MARGIN, own if own is not None else deadline)


def _watchdog_timeout(process_group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout of backends with a watchdog; None: nothing ends the process."""
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        return None
    timeouts = []
    for part in dist.get_backend_config(process_group).split(","):
        device, backend = part.split(":", 1)
        if backend == "nccl":
            options = process_group._get_backend(torch.device(device)).options
            timeouts.append(options._timeout)
    return min(timeouts, default=None)
