"""Keep CPU cores out of idle states while ranks wait.

A core without work enters an idle state, on a virtual machine through the host, and needs time to
leave it. Ranks under CPU quotas stop a hundred times a second. On the machine of the published
results, idle states cost plain passes 6 to 9 % of their speed, unevenly between ranks. While a
process holds `/dev/cpu_dma_latency` open with 0 microseconds in it, the kernel polls instead (PM
QoS, `Documentation/power/pm_qos_interface.rst`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REQUESTS = Path("/dev/cpu_dma_latency")


def can_prevent_idle_states() -> bool:
    """Whether this process may write the request, which usually needs root."""
    return os.access(REQUESTS, os.W_OK)


@contextmanager
def prevent_idle_states() -> Iterator[None]:
    """Keep all cores out of idle states during the `with` block, if `can_prevent_idle_states`.

    The kernel drops the request when the process ends, however it ends.
    """
    if not can_prevent_idle_states():
        yield
        return
    request = os.open(REQUESTS, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(request, struct.pack("i", 0))
        yield
    finally:
        os.close(request)
