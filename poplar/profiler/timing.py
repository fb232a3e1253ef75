"""Wall time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from poplar.system.devices import synchronize


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds until the device has finished `run`: the mean over `repeats` without a pause."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - began) / repeats
