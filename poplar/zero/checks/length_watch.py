"""Notices batches whose padded length changes from step to step.

The plan counts samples, so ranks with longer samples than planned make the others wait.
"""

from __future__ import annotations

import warnings
from typing import Any

from poplar.data.lengths import padded_length
from poplar.data.sampler import last_drawn_order

STEPS = 16
"""Steps that are looked at."""
TOLERANCE = 0.15
"""The longest may be longer than the shortest by this fraction: the time of a pass grows at least
in proportion to the length where the model takes most of it."""

_ADVICE = (
    "pass lengths=, the length of each sample, to HeteroBatchSampler and to autotune, and collate "
    "with poplar.data.CollateMicroBatches (with PoplarTrainer: PoplarArguments("
    "balance_lengths=True)), which changes no gradient"
)


class LengthWatch:
    """Warns once, in the first steps, if padded lengths differ much and nothing evens them out.

    One rank looks, at shapes only, so nothing waits for the device.
    """

    def __init__(self, *, looks: bool) -> None:
        """`looks`: whether this rank looks."""
        self._steps_left = STEPS if looks else 0
        self._shortest, self._longest = 0, 0

    def look(self, batch: Any) -> None:
        """Look at the batch of a step; ignore it if lengths are balanced or enough were seen."""
        if not self._steps_left or batch is None:
            return
        self._steps_left -= 1
        length = padded_length(batch)
        if not length:
            return
        self._longest = max(self._longest, length)
        self._shortest = min(self._shortest or length, length)
        differs = self._longest - self._shortest > TOLERANCE * self._shortest
        if not differs or last_drawn_order().get("lengths"):
            return
        self._steps_left = 0
        warnings.warn(
            f"batches were padded to {self._shortest} to {self._longest} tokens (dim 1) in the "
            "first steps, but the plan counts samples, so ranks with longer samples make the "
            f"others wait; {_ADVICE}",
            stacklevel=5,
        )
