"""Memory of a pass while the backward of each unit runs, from hooks on the gradients.

The gradients themselves are taken out: how long they live depends on the stage. Those of a unit and
of the resident units that the engine would hold are added to the peaks, because whoever measures
frees each as soon as it is complete, and their full size is subtracted where the unit ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class TrainedUnit(NamedTuple):
    """The trained parameters of a unit."""

    parameters: Sequence[nn.Parameter]
    resident: bool
    modules: Sequence[nn.Module] = ()
    """Their forwards are the unit's; none for what is outside of all blocks."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


class Meter(Protocol):
    """Counts bytes that were allocated since it was started."""

    @property
    def live(self) -> int:
        """Bytes that are alive."""

    @property
    def peak(self) -> int:
        """Most live bytes since `begin_window`."""

    def begin_window(self) -> None:
        """Begin a new peak."""


class UnitBytes(NamedTuple):
    """As `BatchPoint.unit_bytes` and `bytes_after_unit`."""

    during: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def times(self, factor: float) -> UnitBytes:
        """Each value times a factor."""
        during, after = (tuple(int(value * factor) for value in both) for both in self)
        return UnitBytes(during, after)

    def plus(self, added: int) -> UnitBytes:
        """Each value and these bytes, at least 0."""
        during, after = (tuple(max(0, value + added) for value in both) for both in self)
        return UnitBytes(during, after)


class UnitWindows:
    """The windows of one pass: each ends when the last gradient of a unit is complete."""

    def __init__(self, units: Sequence[TrainedUnit]) -> None:
        self._units = units
        self._resident = sum(unit.gradient_bytes for unit in units if unit.resident)
        self._missing = [len(unit.parameters) for unit in units]
        self._during = [0] * len(units)
        self._after = [0] * len(units)
        self._held = 0
        """Gradients that are complete and that the engine would hold."""
        self._most = 0
        """The most in this window, with `_held`."""

    @contextmanager
    def measuring(self, meter: Meter) -> Iterator[None]:
        """Measure one pass inside. Every gradient must be freed by a hook that exists already."""
        self._meter = meter
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, parameter.nbytes))
            for number, unit in enumerate(self._units)
            for parameter in unit.parameters
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self) -> UnitBytes:
        """By unit; empty if a unit did not get all of its gradients."""
        if any(self._missing):
            return UnitBytes()
        most = max(self._most, self._meter.peak + self._held) - self._resident
        for number, unit in enumerate(self._units):
            if unit.resident:
                self._during[number], self._after[number] = most, self._meter.live
        both = (tuple(max(0, value) for value in each) for each in (self._during, self._after))
        return UnitBytes(*both)

    def _hook(self, number: int, nbytes: int) -> Callable[[Tensor], None]:
        def complete(_parameter: Tensor) -> None:
            self._most = max(self._most, self._meter.peak + self._held)
            self._held += nbytes
            self._meter.begin_window()
            self._missing[number] -= 1
            unit = self._units[number]
            if not self._missing[number] and not unit.resident:
                self._end_window(number, unit.gradient_bytes)

        return complete

    def _end_window(self, number: int, gradients: int) -> None:
        now = self._meter.live + self._held
        others = gradients + self._resident
        self._during[number] = max(self._most, now) - others
        self._after[number] = now - others
        self._held -= gradients
        self._most = 0
