"""Measures how much slower each rank is now than when it was profiled.

A core of a shared machine may be 10 % faster or slower from one second to the next. So before and
after some steps each rank times plain passes of a separate model. The measured step time is scaled
by the ratio of two predictions: at the speeds of the profile, and at the present speeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from prediction_models import Subject

from poplar.profiler.passes import Passes
from poplar.values.profile import DeviceProfile

SECONDS = 0.5
"""Length of one measurement: dozens of quota periods."""


class Yardstick:
    """Plain passes of a separate model, timed as in the profiler."""

    def __init__(self, subject: Subject, device: DeviceProfile) -> None:
        """`device` is the profile of this rank."""
        short = [point for point in device.points if point.seconds <= SECONDS]
        self._point = max(short, key=lambda point: point.batch, default=device.points[0])
        self._repeats = max(1, round(SECONDS / self._point.seconds))
        self._passes = Passes(
            subject.model(), subject.loss, subject.batch(self._point.batch), torch.device("cpu")
        )

    def slowness(self) -> float:
        """Seconds of a pass now, over those in the profile. Call it on all ranks at once."""
        self._passes.run(self._point.batch)  # fill the caches, which the trained model has used
        return self._passes.seconds(self._point.batch, self._repeats) / self._point.seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """Consecutive steps of one plan."""

    seconds: float
    """Seconds of a step: from the common start to the end of the slowest rank, over the steps."""
    slowness: tuple[float, ...]
    """By rank, the mean of the measurements before and after."""


def steadied(turns: Sequence[Turn], expected: Callable[[Sequence[float]], float]) -> float:
    """Step time at the speeds of the profile.

    Args:
        turns: of one plan.
        expected: seconds of the plan's step for slowdowns of the ranks.

    Returns:
        Seconds, the median over turns.
    """

    def of(turn: Turn) -> float:
        return turn.seconds * expected([1.0] * len(turn.slowness)) / expected(turn.slowness)

    return statistics.median(map(of, turns))
