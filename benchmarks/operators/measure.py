"""Ways take turns in every round, and so does a copy, which tells how fast memory is just then.

On CUDA every way runs twice a round: once for the host's seconds, launches included, which is what
a trainer waits for, and once for the device's own, which is what a bandwidth is judged by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from operators.task import Task
from poplar import ops

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Far above any last-level cache that a process has for itself."""
MOST_COMPARED = 20_000_000
CYCLES_PER_SECOND = 3e9
"""Of no GPU so far: one that sleeps for so many cycles sleeps for a second at least."""


class Wrong(Exception):
    """A way gave another result."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One task: by round, and by way before that."""

    seconds: Mapping[str, Sequence[float]]
    """The host's, until the device is done."""
    device_seconds: Mapping[str, Sequence[float]]
    """The device's own, between two CUDA events; empty on the CPU."""
    speeds: Sequence[float]
    """Bytes per second of a copy; on CUDA by the device's seconds."""


def measure(task: Task, rounds: int) -> Measured:
    """Time every way, after all of them have been held against the first.

    Raises:
        Wrong: a way's result is not the first one's.
    """
    check(task)
    copies = _Copies(task.device)
    seconds: dict[str, list[float]] = {way: [] for way in task.ways}
    device_seconds: dict[str, list[float]] = {way: [] for way in task.ways}
    speeds = []
    for _ in range(rounds):
        speeds.append(copies.bytes_per_second())
        for name, way in task.ways.items():
            way.prepare()
            launched, done = _host_seconds(way.run, task.device)
            seconds[name].append(done)
            if task.device == "cuda":
                way.prepare()
                device_seconds[name].append(_device_seconds(way.run, launched))
    return Measured(
        seconds=seconds,
        device_seconds=device_seconds if task.device == "cuda" else {},
        speeds=speeds,
    )


def check(task: Task) -> None:
    """Hold every way's result against the first one's: of large ones, elements all over them."""
    expected = None
    for name, way in task.ways.items():
        way.prepare()
        way.run()
        result = way.result().reshape(-1)
        # Not a power of two, so that a wrong block or tensor is not stepped over.
        result = result[:: max(1, result.numel() // MOST_COMPARED)].float()
        expected = result.clone() if expected is None else expected
        least = task.tolerance * float(expected.abs().max())
        if not torch.allclose(result, expected, rtol=task.tolerance, atol=least):
            off = (result - expected).abs().max()
            raise Wrong(f"{task.name}: {name!r} is off by {float(off):g}")


class _Copies:
    """The fastest of torch's copy and streaming stores."""

    def __init__(self, device: str) -> None:
        self._device, self._bytes = device, COPY_BYTES[device]
        source, target = (torch.ones(self._bytes // 4, device=device) for _ in range(2))
        self._ways = (lambda: target.copy_(source), lambda: ops.copy_(target, source))

    def bytes_per_second(self) -> float:
        return 2 * self._bytes / min(self._seconds(way) for way in self._ways)

    def _seconds(self, run: Callable[[], object]) -> float:
        launched, done = _host_seconds(run, self._device)
        return _device_seconds(run, launched) if self._device == "cuda" else done


def _host_seconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Until all is launched, and until the device is done with it."""
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    settle()
    began = time.perf_counter()
    run()
    launched = time.perf_counter() - began
    settle()
    return launched, time.perf_counter() - began


def _device_seconds(run: Callable[[], object], launching: float) -> float:
    """Between the first kernel and the last, all of them launched while the device still sleeps.

    Args:
        run: what does not wait for the device.
        launching: seconds that the host needs for it, at most.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((2 * launching + 1e-3) * CYCLES_PER_SECOND))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return 1e-3 * began.elapsed_time(ended)
