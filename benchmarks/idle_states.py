"""Keep CPU cores out of idle states while ranks wait.

A core without work enters an idle state, on a virtual machine through the host, and needs time to
leave it; the host may run something else there meanwhile. Ranks under CPU quotas stop a hundred
times a second, so this slows them down, and unevenly.

Where the kernel has a driver of idle states, it polls instead while a process holds
`/dev/cpu_dma_latency` open with 0 microseconds in it (PM QoS,
`Documentation/power/pm_qos_interface.rst`). Without a driver, as in some virtual machines, the
request changes nothing. Then each core gets a process that computes whenever nothing else does:
`SCHED_IDLE`, so every other process interrupts it at once (this file as a program). Not if this
process has a CPU quota, which they would use up.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

REQUESTS = Path("/dev/cpu_dma_latency")
DRIVER = Path("/sys/devices/system/cpu/cpuidle/current_driver")
ROUNDS = 100_000
"""Iterations, a few milliseconds, between two checks that the parent process still runs."""


def obeys_requests() -> bool:
    """Whether a request changes anything, and this process may write one, as usually only root."""
    try:
        driver = DRIVER.read_text().strip()
    except OSError:
        return False
    return driver != "none" and os.access(REQUESTS, os.W_OK)


def can_prevent_idle_states() -> bool:
    """Whether `prevent_idle_states` does anything."""
    from poplar.system.host_limits import processor_quota  # not where emulation.py is a program

    return obeys_requests() or processor_quota() is None


@contextmanager
def prevent_idle_states() -> Iterator[None]:
    """Keep all cores of this process out of idle states during the `with` block, if it can.

    Linux only. It ends with this process, however that ends.
    """
    with ExitStack() as stack:
        if obeys_requests():
            request = os.open(REQUESTS, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, request)
            os.write(request, struct.pack("i", 0))
        elif can_prevent_idle_states():
            for core in sorted(os.sched_getaffinity(0)):
                stack.enter_context(_kept_busy(core))
        yield


@contextmanager
def _kept_busy(core: int) -> Iterator[None]:
    given = [sys.executable, "-S", "-E", __file__, str(core), str(os.getpid())]
    process = subprocess.Popen(given, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def keep_busy(core: int, parent: int) -> None:
    """Compute on a core while nothing else does, as long as the parent process runs."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)  # so that /proc/stat counts its seconds apart from those of other programs
    while os.getppid() == parent:
        for _ in range(ROUNDS):
            pass


if __name__ == "__main__":
    keep_busy(*map(int, sys.argv[1:]))
