"""How fast a rank is that computes nothing: it times a fixed piece of work, now and then.

The work takes long enough for a device that is throttled, or shares its time with other jobs, to
show it, and so little of the time that a rank on the same host as active ones costs these 1 %.
"""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from poplar.system.out_of_memory import is_out_of_memory

WORK_SECONDS = 0.2
"""Of one measurement. A device under a quota runs at full speed for the first milliseconds."""
REST_SECONDS = 20.0
"""Between two measurements: 99 % of the time."""
FRESH_SECONDS = 60.0
"""How long a measurement counts at least: a rank that has ended reports none."""
FIRST = 3
"""Measurements that the later ones are compared with. The fastest counts."""
LATEST = 3
"""Measurements of which the slowest counts. Each time that the rank is left out again, they are
twice as many: it may be fast only while it has nothing to do."""


class IdleSpeed:
    """The speed of the device of a rank that is left out, relative to when it was."""

    def __init__(self, device: torch.device, times: int) -> None:
        """`times`: how often the rank has been left out."""
        self._device = device
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=LATEST * 2 ** (times - 1))
        self._next = -math.inf

    def change(self) -> float | None:
        """Measure, if it is time to. Takes `WORK_SECONDS` then.

        Returns:
            The logarithm of how many times slower the device is than when the rank was left out;
            None: there is nothing new, or it is not known yet.
        """
        if time.monotonic() < self._next:
            return None
        try:
            while len(self._first) < FIRST:
                self._first.append(seconds_of_work(self._device))
            self._latest.append(seconds_of_work(self._device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._latest.clear()  # another job has the memory, so it is no rank to take back
        self._next = time.monotonic() + REST_SECONDS
        if len(self._latest) < (self._latest.maxlen or 0):
            return None
        return math.log(max(self._latest) / min(self._first))


def seconds_of_work(device: torch.device) -> float:
    """Mean seconds of a product of matrices and a pass over memory, for `WORK_SECONDS`."""
    size = 512 if device.type == "cpu" else 2048
    matrix = torch.ones(size, size, device=device)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < WORK_SECONDS or not count:
        float((matrix @ matrix + matrix).sum())
        count += 1
    return passed / count
