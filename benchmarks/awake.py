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
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

REQUESTS = Path("/dev/cpu_dma_latency")


def can_stay_awake() -> bool:
    """Whether this process may ask for it: root, as a rule."""
    return os.access(REQUESTS, os.W_OK)


class AwakeCores(AbstractContextManager[None]):
    """No core sleeps during the `with` block, where `can_stay_awake`; elsewhere nothing changes.

    The request ends with the process that made it, however it ends.
    """

    def __init__(self) -> None:
        self._request: int | None = None

    def __enter__(self) -> None:
        if can_stay_awake():
            self._request = os.open(REQUESTS, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._request, struct.pack("i", 0))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cores may sleep again."""
        if self._request is not None:
            os.close(self._request)
            self._request = None
