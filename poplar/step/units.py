"""The units of a step: how they are merged, and cut into the buffers that are reduced at once.

The engine builds its units by these rules (`zero.unit`). The profile has what it built, so time and
memory are predicted for the same buffers. Only without a profile of the engine are they estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from poplar.values.profile import ModelProfile

MAX_FLAT_BYTES = 32 << 20
"""Size in fp32 of a buffer, unless the transport allows larger ones.

A larger unit is split, but not inside a parameter; smaller units may share a buffer. (DDP's default
bucket is 25 MiB.) See `Control.max_flat_bytes`.
"""

MERGED_UNIT_BYTES = 2 << 20
"""Consecutive blocks are merged into one unit up to this size, unless the user named the units.

For smaller units the latency of a collective dominates (about 1 ms of CPU time on gloo, in which a
core moves 3 MB; tens of microseconds on NCCL). Larger units cost memory while they are unsharded.
"""

LEAST_IN_FLIGHT = 2
"""Reductions that may be in flight at a time, at least."""

_NEGLIGIBLE = 1 / 16
"""A buffer may exceed its limit by this part: a small tensor is not worth a collective."""


def merged(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Merge consecutive units while their elements take at most `limit` bytes in fp32."""
    groups: list[list[int]] = []
    size = 0
    for unit, numel in enumerate(numels):
        if groups and 4 * (size + numel) <= limit:
            groups[-1].append(unit)
            size += numel
        else:
            groups.append([unit])
            size = numel
    return groups


def cut(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Cut consecutive parameters into buffers of about `limit` bytes in fp32."""
    parts: list[list[int]] = []
    size = 0
    for number, numel in enumerate(numels):
        added = 4 * numel
        if parts and (size <= _NEGLIGIBLE * limit or size + added <= (1 + _NEGLIGIBLE) * limit):
            parts[-1].append(number)
            size += added
        else:
            parts.append([number])
            size = added
    return parts


def in_flight(buffers_of_units: Iterable[int]) -> int:
    """Reductions that may be in flight where every pass reduces: all of a unit, and another one."""
    return max(LEAST_IN_FLIGHT, 1 + max(buffers_of_units, default=0))


_TICKS = 1 << 40
"""Ticks of a forward whose units were timed."""
_LEAST = 1e-6
"""The part of a direction that a unit takes at least, so that no two units are at the same time."""


@dataclass(frozen=True)
class StepUnits:
    """The units as one stage communicates them, in the order of the forward."""

    buffers: tuple[tuple[int, ...], ...]
    """By unit, elements of each of the buffers in which it is reduced."""
    forward: tuple[int, ...]
    """By unit, compute of its forward, in ticks. Whole numbers, so that sums are exact."""
    backward: tuple[int, ...]
    """By unit, compute of its backward, in ticks. As many in all as of the forward, whatever the
    seconds of both are."""
    resident: frozenset[int] = frozenset()
    """Units that stay unsharded until the end of a pass and are reduced last."""
    persistent: frozenset[int] = frozenset()
    """Units that stay unsharded between the passes of a step."""
    parts: tuple[Mapping[int, int], ...] = field(default=(), hash=False)
    """By unit, its elements of each unit of the model."""
    unsharded: tuple[float, ...] = ()
    """By unit, what an unshard moves: its elements, and as many more as its frozen parameters have
    bytes for. Empty where parameters are not sharded."""

    @classmethod
    def of(
        cls,
        model: ModelProfile,
        stage: int,
        persistent: frozenset[int] = frozenset(),
        *,
        may_merge: bool = True,
    ) -> StepUnits:
        """Stage 3 communicates unit by unit. Other stages merge small neighbouring units, unless
        `may_merge` is False. Compute is in proportion to the elements if it was not measured.
        """
        if stage == 3 or not may_merge:
            order, buffers = list(range(len(model.unit_numels))), unit_buffers(model)
        else:
            order, buffers = ordered_units(model), merged_buffers(model)
        parts = tuple(parts_of(model, order, list(map(sum, buffers))))
        forward = backward = tuple(map(sum, buffers))
        if model.unit_forward_fraction:
            forward = _ticks(model, model.unit_forward_fraction, parts)
            backward = _ticks(model, model.unit_backward_fraction, parts)
        if stage < 3:
            return cls(tuple(buffers), forward, backward, parts=parts)
        resident = frozenset(model.resident_units)
        each = model.param_bytes
        unsharded = tuple(own / each for own in model.parameter_bytes) if each else forward
        return cls(tuple(buffers), forward, backward, resident, persistent, parts, unsharded)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """By unit, its elements."""
        return tuple(map(sum, self.buffers))

    @property
    def ticks(self) -> int:
        """Compute of a forward, and of a backward."""
        return sum(self.forward)

    @property
    def is_proportional(self) -> bool:
        """Whether compute is in proportion to the elements."""
        return self.forward == self.backward == self.numels

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(self.numels)

    @property
    def reductions(self) -> int:
        """Buffers of the whole model."""
        return sum(map(len, self.buffers))

    @property
    def reductions_in_flight(self) -> int:
        """Buffers that may be in flight at a time where every pass reduces.

        All that is resident is one unit of the engine.
        """
        resident = sum(len(self.buffers[unit]) for unit in self.resident)
        return in_flight([resident, *map(len, self.buffers)])


def unit_buffers(model: ModelProfile) -> list[tuple[int, ...]]:
    """By unit, elements of the buffers in which it is reduced if no units are merged."""
    return list(model.unit_buffers or map(_split, model.unit_numels))


def merged_buffers(model: ModelProfile) -> list[tuple[int, ...]]:
    """By merged unit, elements of the buffers in which it is reduced, in `ordered_units`' order."""
    if model.merged_buffers:
        return list(model.merged_buffers)
    numels = [model.unit_numels[unit] for unit in ordered_units(model)]
    groups = merged(numels, MAX_FLAT_BYTES)
    return [_split(sum(numels[unit] for unit in units)) for units in groups]


def ordered_units(model: ModelProfile) -> list[int]:
    """The units in the order in which they are merged: what is outside of all blocks is first."""
    resident = sorted(model.resident_units)
    return [*resident, *(u for u in range(len(model.unit_numels)) if u not in resident)]


def _split(numel: int) -> tuple[int, ...]:
    largest = MAX_FLAT_BYTES // 4
    return (largest,) * (numel // largest) + (numel % largest,) * bool(numel % largest)


def parts_of(
    model: ModelProfile, order: Sequence[int], numels: Sequence[int]
) -> Iterator[dict[int, int]]:
    """The elements of each unit of the model in consecutive parts of these sizes."""
    left = [(unit, model.unit_numels[unit]) for unit in reversed(order)]
    for numel in numels:
        part: dict[int, int] = {}
        missing = numel
        while missing or not part:
            unit, own = left.pop()
            part[unit] = min(own, missing)
            if own > missing:
                left.append((unit, own - missing))
            missing -= part[unit]
        yield part


def _ticks(
    model: ModelProfile, fractions: Sequence[float], parts: Sequence[Mapping[int, int]]
) -> tuple[int, ...]:
    """The fractions of these parts of the model, scaled and rounded to `_TICKS` in all."""
    least = _LEAST * math.fsum(fractions)
    sums = (
        math.fsum(
            fractions[unit] * (own / model.unit_numels[unit] if own else 1.0)
            for unit, own in part.items()
        )
        for part in parts
    )
    seconds = [max(least, own) for own in sums]
    total = math.fsum(seconds)
    ends = [min(_TICKS, round(_TICKS * end / total)) for end in accumulate(seconds)]
    return tuple(end - begin for begin, end in pairwise([0, *ends[:-1], _TICKS]))
