"""Cores that do not sleep while ranks wait.

A core with nothing to do sleeps, on a virtual machine by way of the host, and wakes up late and
cold. Ranks under quotas stand still a hundred times a second: on the machine that these benchmarks
were written on, that cost plain passes 6 to 9 % of their speed, and by turns, so that one rank
waited for the other. As long as somebody holds `/dev/cpu_dma_latency` open with 0 microseconds in
it, the kernel polls instead (PM QoS, `Documentation/power/pm_qos_interface.rst`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REQUESTS = Path("/dev/cpu_dma_latency")


def can_stay_awake() -> bool:
    """Whether this process may ask for it: root, as a rule."""
    return os.access(REQUESTS, os.W_OK)


@contextmanager
def awake_cores() -> Iterator[None]:
    """No core sleeps during the `with` block, where `can_stay_awake`; elsewhere nothing changes.

    The request ends with the process that made it, however it ends.
    """
    if not can_stay_awake():
        yield
        return
    request = os.open(REQUESTS, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(request, struct.pack("i", 0))
        yield
    finally:
        os.close(request)
