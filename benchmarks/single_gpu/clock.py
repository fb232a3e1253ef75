"""Seconds between steps: by CUDA events, which do not synchronize the host, or by the host."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class StepClock:
    """Marks in the order of the device's work; the host may run ahead of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Mark the end of all work that has been issued."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between consecutive marks; waits until the device has reached the last one."""
        if self._events:
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)]
        return [b - a for a, b in pairwise(self._times)]
