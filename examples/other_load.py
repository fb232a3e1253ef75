"""Was the machine quiet enough for the figures? Other processes' CPU time, and changed speeds.

Both limits are percentages that the messages state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from poplar import Plan
from poplar.pair.speed import Speed
from poplar.values.formatting import NOISY, format_interval, is_noisy

MAX_OTHER_LOAD = 0.05
"""Fraction of the cores' time that other processes may use."""
MAX_SPEED_CHANGE = NOISY
"""Relative change of a rank's speed between two measurements."""


class OtherLoad:
    """CPU time of other processes on the cores of this job, since the object was built.

    Every rank builds one and calls `fraction` at about the same time.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._own = time.process_time()
        self._busy = busy_seconds()

    def fraction(self) -> float | None:
        """Fraction of the ranks' cores used by others; None if it cannot be read. Collective.

        Ranks must be bound to one core each; otherwise the whole machine counts.
        """
        elapsed = time.perf_counter() - self._began
        own = time.process_time() - self._own
        now = busy_seconds()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (own, bound_core()))
        cores = {core for _, core in ranks}
        used = set(now) if None in cores else cores
        if not used or not used <= set(now):
            return None
        total = sum(now[core] - self._busy[core] for core in used)
        ours = sum(seconds for seconds, _ in ranks)
        if total < 0.5 * ours:  # some container runtimes do not count
            return None
        return max(0.0, total - ours) / (elapsed * len(used))


def bound_core() -> int | None:
    """The core that this process is bound to; None if it may use several."""
    cores = os.sched_getaffinity(0)
    return next(iter(cores)) if len(cores) == 1 else None


def busy_seconds() -> dict[int, float]:
    """Seconds that each core was not idle since the machine started."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _io, interrupts, soft, stolen = map(int, values[:8])
            busy = user + nice + system + interrupts + soft + stolen
            found[int(name[3:])] = busy / tick
    return found


def warnings_of(
    other_load: float | None,
    before: Sequence[Speed],
    after: Sequence[Speed],
    planned: Plan | None = None,
) -> list[str]:
    """A sentence for each reason to distrust the figures; empty on a quiet machine."""
    found = []
    prediction = (planned and planned.prediction) or {}
    step, interval = prediction.get("step_seconds"), prediction.get("step_interval")
    if interval and is_noisy(step, interval):
        found.append(f"the predicted step is uncertain ({format_interval(step, interval)})")
    if other_load is not None and other_load > MAX_OTHER_LOAD:
        found.append(
            f"other processes used {100 * other_load:.0f} % of the ranks' cores during training "
            f"(limit: {100 * MAX_OTHER_LOAD:.0f} %)"
        )
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        change = last.samples_per_second / first.samples_per_second - 1
        if abs(change) > MAX_SPEED_CHANGE:
            found.append(
                f"rank {rank} ran {first.samples_per_second:.1f} samples/s before training and "
                f"{last.samples_per_second:.1f} after it ({100 * change:+.0f} %; "
                f"limit: {100 * MAX_SPEED_CHANGE:.0f} %)"
            )
    return found


def describe(warnings: Sequence[str]) -> str:
    """The warnings as a message, or a statement that the check found nothing."""
    if not warnings:
        return (
            f"noise check passed (limits: other processes {100 * MAX_OTHER_LOAD:.0f} % of the "
            f"cores, change of a rank's speed {100 * MAX_SPEED_CHANGE:.0f} %)"
        )
    reasons = "".join(f"\n  {warning}" for warning in warnings)
    return f"the machine was too noisy for these figures, run again when it is idle:{reasons}"
