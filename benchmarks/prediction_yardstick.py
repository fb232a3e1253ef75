"""How slow each rank is at the moment, beside how it was when it was profiled.

A core of a shared machine is a tenth faster or slower from one second to the next, as the other
thread of its core, which may be somebody else's, has something to do or not. Then one step, timed
twice, differs by more than a prediction may be off. So before and after some steps each rank times
plain passes of a model that nobody trains, and what a step took is also told as it would have been
on ranks as fast as the profile has them: times the step's prediction from the profile, over its
prediction from the profile with each rank's speed of that moment.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from prediction_models import Subject

from poplar.profile import DeviceProfile
from poplar.profiler.passes import Passes

SECONDS = 0.5
"""Of one measurement: dozens of the periods in which quotas are given out."""


class Yardstick:
    """Plain passes of a model of its own, as the profiler times them."""

    def __init__(self, subject: Subject, device: DeviceProfile) -> None:
        """One per rank: `device` is what the profile has about the rank that is here."""
        short = [point for point in device.points if point.seconds <= SECONDS]
        self._point = max(short, key=lambda point: point.batch, default=device.points[0])
        self._repeats = max(1, round(SECONDS / self._point.seconds))
        self._passes = Passes(
            subject.model(), subject.loss, subject.batch(self._point.batch), torch.device("cpu")
        )

    def slowness(self) -> float:
        """Seconds of a pass now, over those in the profile. All ranks at once, as they train."""
        self._passes.run(self._point.batch)  # the model that is trained has taken the caches
        return self._passes.seconds(self._point.batch, self._repeats) / self._point.seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of one plan, one after the other."""

    seconds: float
    """Of a step: from when all ranks began the first to when the slowest was done with the last,
    over their number."""
    slowness: tuple[float, ...]
    """Of each rank, the mean of just before and just after."""


def steadied(turns: Sequence[Turn], expected: Callable[[Sequence[float]], float]) -> float:
    """What a step would have taken on ranks as fast as the profile has them.

    Args:
        turns: what was measured of one plan.
        expected: seconds of the plan's step by the slowness of each rank.

    Returns:
        Seconds, the median over turns.
    """

    def of(turn: Turn) -> float:
        return turn.seconds * expected([1.0] * len(turn.slowness)) / expected(turn.slowness)

    return statistics.median(map(of, turns))
