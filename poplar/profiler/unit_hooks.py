"""Seconds of each unit in one pass, from hooks on modules and gradients.

A unit's forward lasts until the next unit's begins, and its backward until its last gradient is
complete, because it is reduced then. So compute outside of all units counts with the unit that it
runs beside: before the first block and after its backward with the first unit (the root, if there
is one), after the last block (the head and the loss) with the last unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poplar.zero.streams import seconds_between


class TrainedUnit(NamedTuple):
    """The trained parameters of a unit; a frozen unit has none."""

    parameters: Sequence[nn.Parameter]
    resident: bool
    modules: Sequence[nn.Module] = ()
    """Their forwards are the unit's; none for what is outside of all blocks."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)


class UnitSeconds(NamedTuple):
    """Seconds of each unit in a pass; empty: unknown."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()


class UnitFractions(NamedTuple):
    """Values of `ModelProfile.unit_forward_fraction` and its backward twin; empty: unknown."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()

    @classmethod
    def of_seconds(cls, forward: Sequence[float], backward: Sequence[float]) -> UnitFractions:
        """The fractions of a pass with these seconds; unknown if a direction took none."""
        total = fsum(forward) + fsum(backward)
        if not (fsum(forward) > 0.0 and fsum(backward) > 0.0):
            return cls()
        return cls(tuple(s / total for s in forward), tuple(s / total for s in backward))


def combined(
    several: Sequence[UnitSeconds] | Sequence[UnitFractions],
    combine: Callable[[Sequence[float]], float],
) -> UnitFractions:
    """The median or mean of several passes or ranks, by unit; unknown if one of them is."""
    if not all(one.forward for one in several):
        return UnitFractions()
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
        """The begin of each unit's first forward."""
        self._complete: list[_Mark | None] = [None] * len(units)
        """The time when each unit's last gradient so far was complete."""
        self._phases: list[_Mark] = []
        """The begin of the forward, the begin of the backward, and its end."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Take the time of one pass inside; call `next_phase` at each of its three ends."""
        with ExitStack() as hooks:
            for number, unit in enumerate(self._units):
                for module in unit.modules:
                    begins = partial(self._on_forward, number)
                    hooks.enter_context(module.register_forward_pre_hook(begins))
                for parameter in unit.parameters:
                    on_gradient = partial(self._on_gradient, number)
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(on_gradient))
            yield

    def next_phase(self) -> None:
        """The forward begins, then the backward begins, then it is over."""
        self._phases.append(self._now())

    def result(self) -> UnitSeconds:
        """Seconds of each unit; unknown if a block had no forward, or a unit no gradient.

        The backward of a block with nothing to train counts with the next unit's.
        """
        start, turn, end = self._phases
        blocks = [n for n, unit in enumerate(self._units) if n and not unit.resident]
        trained = [n for n in blocks if self._units[n].parameters]
        seen = [self._began[n] for n in blocks], [self._complete[n] for n in trained]
        if not self._units or None in seen[0] or None in seen[1]:
            return UnitSeconds()
        whole = seconds_between(start, end)
        reversal = min(seconds_between(start, turn), whole)

        def elapsed(mark: _Mark | None) -> float:
            return 0.0 if mark is None else seconds_between(start, mark)

        begins, ends = [0.0], [whole]
        for number in range(1, len(self._units)):
            begin = elapsed(self._began[number]) if number in blocks else 0.0
            begins.append(min(max(begins[-1], begin), reversal))
        last = reversal
        for number in reversed(range(1, len(self._units))):
            complete = elapsed(self._complete[number]) if number in blocks else 0.0
            last = min(max(last, complete), whole)
            ends.insert(1, last)
        return UnitSeconds(
            tuple(after - before for before, after in pairwise([*begins, reversal])),
            tuple(before - after for before, after in pairwise([*ends, reversal])),
        )

    def _on_forward(self, number: int, _module: nn.Module, _arguments: object) -> None:
        if self._began[number] is None:  # a recomputed forward runs in the backward
            self._began[number] = self._now()

    def _on_gradient(self, number: int, _parameter: Tensor) -> None:
        self._complete[number] = self._now()

    def _now(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event
"""A time on the host, or an event on the device's stream."""
