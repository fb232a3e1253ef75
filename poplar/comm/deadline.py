"""The deadline of a group's waits, which comes before that of torch's watchdog."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=5)
WATCHDOG_MARGIN = timedelta(minutes=2)
"""Time for Poplar to report a failure and to abort what is pending on devices. After the timeout of
a process group of devices, torch's watchdog ends the process instead."""
_LONGEST = timedelta(days=36_500)
"""torch counts nanoseconds from the start of the system in 64 bits."""


def deadline_of(process_group: dist.ProcessGroup, given: timedelta | None) -> timedelta:
    """How long waits of a group on this process group last.

    Args:
        process_group: torch's own timeout counts if its watchdog looks after it.
        given: by the caller; None: 5 minutes, or shorter, to end before the process group's.

    Raises:
        ValueError: it is not positive, too long, or not shorter than the process group's.
    """
    watchdog = _watchdog_timeout(process_group)
    if given is None:
        if watchdog is None:
            return DEFAULT_TIMEOUT
        return min(DEFAULT_TIMEOUT, max(watchdog - WATCHDOG_MARGIN, watchdog / 2))
    if not timedelta(0) < given <= _LONGEST:
        raise ValueError(
            f"timeout must be positive and at most {_LONGEST.days} days, got {given}; the default "
            f"is {DEFAULT_TIMEOUT}"
        )
    if watchdog is not None and given >= watchdog:
        raise ValueError(
            f"timeout={given} must be shorter than the timeout of the process group ({watchdog}), "
            "after which torch's watchdog ends the process. Pass a timeout of at least "
            f"{given + WATCHDOG_MARGIN} to init_process_group, or a shorter one here"
        )
    return given


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
