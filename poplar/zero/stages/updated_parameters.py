"""The all-gathers that send updated shards to all ranks, at stages that shard only the state.

By default a step waits for them. With `overlap`, a unit waits for its own when its next forward
begins. Until then its parameters are detached, so that reading them gives NaN and not old values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poplar.comm import Work
from poplar.zero.unit import Unit


class UpdatedParameters:
    """The all-gathers in flight, by unit."""

    def __init__(self, wait: Callable[[Work, str], None]) -> None:
        """`wait`: waits for a collective before the compute stream continues."""
        self.overlap = False
        self._wait = wait
        self._pending: dict[Unit, Sequence[Work]] = {}

    def start(self, unit: Unit, gathers: Sequence[Work]) -> None:
        """Add the all-gathers of a unit, which have been issued."""
        self._pending[unit] = gathers
        if self.overlap:
            for flat in unit.trained:
                flat.detach_parameters()

    def require(self, unit: Unit) -> None:
        """Wait for the values of a unit. Local."""
        for gather in self._pending.pop(unit, ()):
            self._wait(gather, f"the new values of {unit.name}")
        for flat in unit.trained:
            if flat.is_detached:
                flat.attach_parameters()

    def finish(self) -> None:
        """Wait for the values of all units. Local."""
        for unit in list(self._pending):
            self.require(unit)
