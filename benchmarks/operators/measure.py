"""Timing: all implementations and a copy are interleaved in every round.

On CUDA every implementation runs twice per round: once for host seconds, launches included, which
is what training waits for, and once for device seconds, which bandwidths are computed from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from operators.task import Task
from poplar import ops

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Far above the last-level cache that one process can use."""
MOST_COMPARED = 20_000_000
CYCLES_PER_SECOND = 3e9
"""Higher than any GPU's clock, so sleeping for this many cycles takes at least a second."""


class Wrong(Exception):
    """An implementation gave a different result."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one task, by implementation and round."""

    seconds: Mapping[str, Sequence[float]]
    """Host seconds until the device has finished."""
    device_seconds: Mapping[str, Sequence[float]]
    """Device seconds between two CUDA events; empty on the CPU."""
    speeds: Sequence[float]
    """Bytes per second of a copy; on CUDA by device seconds."""


def measure(task: Task, rounds: int) -> Measured:
    """Time every implementation, after comparing all results with the first.

    Raises:
        Wrong: a result differs from the first one's.
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
    """Compare every result with the first one's; of large results, evenly spaced elements."""
    expected = None
    for name, way in task.ways.items():
        way.prepare()
        way.run()
        result = way.result().reshape(-1)
        # The step is not a power of two, so that no wrong block or tensor is skipped.
        result = result[:: max(1, result.numel() // MOST_COMPARED)].float()
        expected = result.clone() if expected is None else expected
        least = task.tolerance * float(expected.abs().max())
        if not torch.allclose(result, expected, rtol=task.tolerance, atol=least):
            off = (result - expected).abs().max()
            raise Wrong(f"{task.name}: {name!r} is off by {float(off):g}")


class _Copies:
    """The faster of torch's copy and streaming stores."""

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
    """Seconds until everything is launched, and until the device has finished."""
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    settle()
    began = time.perf_counter()
    run()
    launched = time.perf_counter() - began
    settle()
    return launched, time.perf_counter() - began


def _device_seconds(run: Callable[[], object], launching: float) -> float:
    """Seconds between the first kernel and the last, all launched while the device still sleeps.

    Args:
        run: code that does not wait for the device.
        launching: the most seconds that the host needs for it.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((2 * launching + 1e-3) * CYCLES_PER_SECOND))
    began.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return 1e-3 * began.elapsed_time(ended)
