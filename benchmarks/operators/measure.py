"""Ways take turns in every round, and so does a copy, which tells how fast memory is just then."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from operators.task import Task
from poplar import ops

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Far above any last-level cache that a process has for itself."""
MOST_COMPARED = 20_000_000


class Wrong(Exception):
    """A way gave another result."""


def measure(task: Task, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds by way and round, and bytes per second of a copy by round.

    Raises:
        Wrong: a way's result is not the first one's.
    """
    check(task)
    copies = _Copies()
    seconds: dict[str, list[float]] = {way: [] for way in task.ways}
    speeds = []
    for _ in range(rounds):
        speeds.append(copies.bytes_per_second())
        for name, way in task.ways.items():
            way.prepare()
            seconds[name].append(_seconds(way.run))
    return seconds, speeds


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

    def __init__(self) -> None:
        self._bytes = COPY_BYTES[torch.get_default_device().type]
        source, target = torch.ones(self._bytes // 4), torch.ones(self._bytes // 4)
        self._ways = (lambda: target.copy_(source), lambda: ops.copy_(target, source))

    def bytes_per_second(self) -> float:
        return 2 * self._bytes / min(_seconds(way) for way in self._ways)


def _seconds(run: Callable[[], object]) -> float:
    """Until the device is done, launches included: what a trainer waits for."""
    _settle()
    began = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - began


def _settle() -> None:
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
