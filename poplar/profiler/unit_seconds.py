"""Seconds of each unit's forward and backward in one pass, from hooks on modules and gradients.

A unit's forward lasts until the next unit's begins, and its backward until its last gradient is
complete, because it is reduced then. So compute outside of all units counts with the unit that it
runs beside: before the first block and after its backward with the first unit (the root, if there
is one), after the last block (the head and the loss) with the last unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import fsum
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poplar.profiler.unit_memory import TrainedUnit


class UnitFractions(NamedTuple):
    """As `ModelProfile.unit_forward_fraction` and `unit_backward_fraction`; empty: unknown."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()

    @classmethod
    def of_seconds(cls, forward: Sequence[float], backward: Sequence[float]) -> UnitFractions:
        """From the seconds of a pass; unknown if a direction took none."""
        total = fsum(forward) + fsum(backward)
        if not (fsum(forward) > 0.0 and fsum(backward) > 0.0):
            return cls()
        return cls(tuple(s / total for s in forward), tuple(s / total for s in backward))


def median_of(passes: Sequence[UnitFractions]) -> UnitFractions:
    """The median of several passes, by unit; unknown if one of them is."""
    return _combined(passes, median)


def mean_of(ranks: Sequence[UnitFractions]) -> UnitFractions:
    """The mean over ranks, by unit; unknown if those of one rank are."""
    return _combined(ranks, fmean)


def _combined(
    several: Sequence[UnitFractions], combine: Callable[[Sequence[float]], float]
) -> UnitFractions:
    if not all(one.forward for one in several):
        return UnitFractions()
    if len({*several}) == 1:
        return several[0]  # to the bit
    directions = (
        [combine(values) for values in zip(*lists, strict=True)]
        for lists in zip(*several, strict=True)
    )
    return UnitFractions.of_seconds(*directions)


class UnitClock:
    """Takes the time of the units in one pass."""

    def __init__(self, units: Sequence[TrainedUnit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._began: list[_Mark | None] = [None] * len(units)
        """By unit, the begin of its first forward."""
        self._complete: list[_Mark | None] = [None] * len(units)
        """By unit, when its last gradient so far was complete."""
        self._phases: list[_Mark] = []
        """The begin of the forward, the begin of the backward, and its end."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Take the time of one pass inside; call `next_phase` at each of its three ends."""
        handles = [
            handle
            for number, unit in enumerate(self._units)
            for handle in (
                *(m.register_forward_pre_hook(self._on_forward(number)) for m in unit.modules),
                *(
                    p.register_post_accumulate_grad_hook(self._on_gradient(number))
                    for p in unit.parameters
                ),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def next_phase(self) -> None:
        """The forward begins, then the backward begins, then it is over."""
        self._phases.append(self._now())

    def result(self) -> UnitFractions:
        """By unit; unknown if a block had no forward, or a unit no gradient."""
        start, turn, end = self._phases
        blocks = [n for n, unit in enumerate(self._units) if n and not unit.resident]
        seen = [self._began[n] for n in blocks], [self._complete[n] for n in blocks]
        if not self._units or None in seen[0] or None in seen[1]:
            return UnitFractions()
        whole = _seconds_between(start, end)
        reversal = min(_seconds_between(start, turn), whole)

        def elapsed(mark: _Mark | None) -> float:
            return 0.0 if mark is None else _seconds_between(start, mark)

        begins, ends = [0.0], [whole]
        for number in range(1, len(self._units)):
            begin = elapsed(self._began[number]) if number in blocks else 0.0
            begins.append(min(max(begins[-1], begin), reversal))
        last = reversal
        for number in reversed(range(1, len(self._units))):
            complete = elapsed(self._complete[number]) if number in blocks else 0.0
            last = min(max(last, complete), whole)
            ends.insert(1, last)
        forward = [after - before for before, after in pairwise([*begins, reversal])]
        backward = [before - after for before, after in pairwise([*ends, reversal])]
        return UnitFractions.of_seconds(forward, backward)

    def _on_forward(self, number: int) -> Callable[[nn.Module, object], None]:
        def begin(_module: nn.Module, _arguments: object) -> None:
            if self._began[number] is None:  # a recomputed forward runs in the backward
                self._began[number] = self._now()

        return begin

    def _on_gradient(self, number: int) -> Callable[[Tensor], None]:
        def complete(_parameter: Tensor) -> None:
            self._complete[number] = self._now()

        return complete

    def _now(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event
"""A time on the host, or an event on the device's stream."""


def _seconds_between(before: _Mark, after: _Mark) -> float:
    """At least 0. The device must have finished the pass."""
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        return max(0.0, float(before.elapsed_time(after)) / 1e3)
    assert not isinstance(after, torch.cuda.Event)
    return max(0.0, after - before)
