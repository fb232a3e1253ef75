"""The moments of a step at which a rank may need the most memory, and what is alive at each.

The engine allocates as the backward proceeds: a unit's gradients, a bucket when they are complete,
the reduced slices, what is received. Activations shrink meanwhile. So a peak is a maximum over
moments, not a sum of maxima.

[Note: moments of a backward]
The backward runs the units in reverse order; the resident ones end with the pass. For each unit

    during   its gradients grow; earlier buckets are in flight
    packed   its gradients are complete and are copied into a bucket (into the sums, at stages that
             reduce once a step)

and at the end of a step all sums, and on the host the receive buffers, are alive without
activations. The forward needs less than `during` of the last unit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from poplar.step.units import (
    LEAST_IN_FLIGHT,
    StepUnits,
    merged_buffers,
    ordered_units,
    parts_of,
    unit_buffers,
)
from poplar.values.communication import Precision, encoded_bytes
from poplar.values.profile import ModelProfile

ACCUMULATOR_BYTES = 4.0
"""Per element: gradients are accumulated in fp32."""
SQUARES_BYTES = 4.0 / 64
"""Per element: the reduction leaves an fp32 sum of squares for every 64 elements."""


class Bytes(NamedTuple):
    """Memory that is linear in the share of a rank."""

    fixed: float = 0.0
    per_share: float = 0.0

    def plus(self, *others: Bytes) -> Bytes:
        """The sum."""
        fixed, per_share = self
        for other in others:
            fixed += other.fixed
            per_share += other.per_share
        return Bytes(fixed, per_share)

    def times(self, factor: float) -> Bytes:
        """As much for each of several elements."""
        return Bytes(self.fixed * factor, self.per_share * factor)


class Moment(NamedTuple):
    """What is alive at one time, besides the state, unsharded parameters and activations."""

    needed: Bytes
    turn: int | None = None
    """In which turn of the backward; `BEFORE` the first gradient, or in the update (None)."""
    packed: bool = False
    """A bucket of the unit is packed, or was just sent."""
    ended: bool = False
    """The unit's backward is over; otherwise the most activations during it count."""


BEFORE = -1


class Sent(NamedTuple):
    """Bytes of an element of the gradients on its way to its owner, and back from it."""

    bucket: float
    """Of a packed copy that is sent; 0: the sums are sent themselves."""
    received: float
    """From each rank."""
    gathered: float = 0.0
    """Of a copy that owners send back (stage 0); 0: into the sums themselves."""

    @classmethod
    def of(
        cls, model: ModelProfile, stage: int, precision: Precision, *, adds_on_host: bool
    ) -> Sent:
        """What a stage sends with this precision of the gradients.

        `adds_on_host`: the ranks of a host add in fp32 what is then encoded.
        """
        if precision == "exact":
            # A wire dtype as wide as the accumulator needs no packed copy.
            is_packed = stage >= 2 or model.wire_bytes < ACCUMULATOR_BYTES
            return cls(model.wire_bytes if is_packed else 0.0, model.wire_bytes)
        encoded = encoded_bytes(precision)
        packed = ACCUMULATOR_BYTES if adds_on_host else encoded
        return cls(packed, packed, encoded if stage == 0 else 0.0)


class Flat(NamedTuple):
    """A buffer that is reduced at once."""

    numel: int
    turn: int
    """Place in the order of the backward at which its gradients are complete."""
    inner: bool
    """That is before the last gradient of the unit of this turn, so it is packed during it."""


@dataclass(frozen=True)
class PerElement:
    """What an element takes when it is allocated, in bytes."""

    gradient: float
    """As the backward returns it."""
    sums: Bytes
    """Accumulated or reduced gradients."""
    bucket: Bytes
    """A packed copy that is sent; nothing where the sums are sent themselves."""
    received: Bytes
    """Parts of other ranks that are added."""
    gathered: Bytes
    """A copy of what owners send back, until the end of the step."""


@dataclass(frozen=True)
class Backward:
    """The order in which the gradients of a model are complete."""

    turns: tuple[int, ...]
    """Units in the order of the backward; the last one is resident, if any is."""
    resident_turn: int | None
    """The turn of all resident units, if there are any."""
    flats: tuple[Flat, ...]
    """In the order in which they are complete."""
    pending: tuple[float, ...]
    """By turn, elements whose gradients are not packed yet when its unit's are complete. Those of
    resident units are always among them: the backward of a head comes first."""
    limit: int
    """Buckets in flight at the same time."""

    @cached_property
    def flats_of(self) -> list[list[Flat]]:
        """The flats that are complete in each turn."""
        found: list[list[Flat]] = [[] for _ in self.turns]
        for flat in self.flats:
            found[flat.turn].append(flat)
        return found

    @classmethod
    def of(cls, model: ModelProfile, stage: int) -> Backward:
        """The backward of a model whose flats are those of a stage."""
        resident = sorted(set(model.resident_units))
        others = [unit for unit in range(len(model.unit_numels)) if unit not in resident]
        turns = [*reversed(others), *resident[:1]]
        turn_of = {unit: turn for turn, unit in enumerate(reversed(others))}
        turn_of.update(dict.fromkeys(resident, len(others)))
        numels = list(_flat_numels(model, stage))
        flats: list[Flat] = []
        held, begun = [0.0] * len(turns), set[int]()
        for numel, units in zip(numels, parts_of(model, ordered_units(model), numels), strict=True):
            parts = {unit: part for unit, part in units.items() if part}
            last = max(map(turn_of.__getitem__, parts))
            flats.append(Flat(numel, last, last in begun))
            for unit, part in parts.items():
                begun.add(turn_of[unit])
                if unit not in resident:
                    for later in range(turn_of[unit], last + 1):
                        held[later] += part
        flats.reverse()  # of those that are complete together, the last one comes first
        staying = sum(model.unit_numels[unit] for unit in resident)
        in_flight = StepUnits.of(model, stage).reductions_in_flight
        return cls(
            turns=tuple(turns),
            resident_turn=len(others) if resident else None,
            flats=tuple(sorted(flats, key=lambda flat: flat.turn)),
            pending=tuple(part + staying for part in held),
            limit=in_flight if stage >= 2 else LEAST_IN_FLIGHT,
        )


def _flat_numels(model: ModelProfile, stage: int) -> Iterator[int]:
    """Elements of the buffers of a stage, in the order of `ordered_units`."""
    if stage < 3:
        return chain.from_iterable(merged_buffers(model))
    buffers = unit_buffers(model)
    return chain.from_iterable(buffers[unit] for unit in ordered_units(model))


@dataclass
class _InFlight:
    """Reductions that have been issued and not waited for."""

    each: PerElement
    limit: int
    keeps: bool
    """Receive buffers are kept, at most as many of a size as were in use at once."""
    flats: deque[int] = field(default_factory=deque)
    most: Counter[int] = field(default_factory=Counter)
    """By size, how many receive buffers of it were in use at once."""

    def make_room(self) -> None:
        """Wait until another reduction may begin."""
        while len(self.flats) >= self.limit:
            self.flats.popleft()

    def start(self, numel: int) -> None:
        """Begin a reduction."""
        self.flats.append(numel)
        self.most[numel] = max(self.most[numel], self.flats.count(numel))

    @property
    def received(self) -> Bytes:
        """Receive buffers: kept ones, or those in use."""
        numel = sum(size * count for size, count in self.most.items())
        return self.each.received.times(numel if self.keeps else sum(self.flats))

    @property
    def bytes(self) -> Bytes:
        """Buckets and receive buffers."""
        return self.each.bucket.times(sum(self.flats)).plus(self.received)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What differs between the passes of a step."""

    later: bool
    """There were passes before in the step, so the sums are alive from its beginning."""
    samples: bool
    """This rank has samples; otherwise it has no gradients, and sends zeros."""


def moments_of(
    backward: Backward, each: PerElement, own: Pass, keeps: str, *, every_pass: bool
) -> Iterator[Moment]:
    """The moments of a pass that reduces, and the update.

    A step that reduces once (stages 0 and 1) does so in its last pass. A flat's sums are allocated
    when its gradients are complete for the first time, and sent from where they are, unless the
    wire is narrower. With `every_pass` (stages 2 and 3) a bucket is packed beside the gradients,
    which are freed then, and this rank's slice of the sums is allocated for the first of them.
    Buckets of the previous pass may still be in flight.
    """
    flight = _InFlight(each, backward.limit, keeps != "freed")
    from_before = own.later and every_pass
    if from_before or keeps == "kept":
        for flat in backward.flats:
            flight.make_room()
            flight.start(flat.numel)
        if not from_before:
            flight.flats.clear()
    numel = sum(flat.numel for flat in backward.flats)
    done, started = numel if own.later else 0, 0

    def moment(gradients: float, bucket: int, *place: Any) -> Moment:
        alive = each.sums.times(done).plus(flight.bytes, each.bucket.times(bucket))
        alive = alive.plus(each.gathered.times(started))
        return Moment(alive.plus(Bytes(gradients)), *place)

    yield moment(0.0, 0, BEFORE)
    for turn, pending in enumerate(backward.pending):
        gradients = each.gradient * pending if own.samples else 0.0
        yield moment(gradients, 0, turn)
        for flat in backward.flats_of[turn]:
            place = turn, True, not flat.inner
            added = 0 if own.later else flat.numel
            if every_pass:
                flight.make_room()
                yield moment(gradients, flat.numel, *place)
                done += added
            else:
                done += added
                yield moment(gradients, 0, *place)
                flight.make_room()
            gradients = max(0.0, gradients - each.gradient * flat.numel)
            flight.start(flat.numel)
            started += flat.numel
            yield moment(gradients, 0, *place)
    sums = each.sums.plus(each.gathered).times(numel)
    yield Moment(sums.plus(flight.received) if flight.keeps else sums)


class Unsharded(NamedTuple):
    """Bytes of unsharded parameters where they are sharded (stage 3)."""

    before: float
    """Before any gradient of the pass is reduced."""
    during: Sequence[float]
    """By turn, while the unit has its backward."""
    packed: Sequence[float]
    """By turn, while a bucket is packed."""

    def at(self, moment: Moment) -> float:
        """The bytes at a moment."""
        if moment.turn is None:
            return 0.0
        if moment.turn == BEFORE:
            return self.before
        return (self.packed if moment.packed else self.during)[moment.turn]


def unsharded_in(
    model: ModelProfile, backward: Backward, persistent: Collection[int], *, samples: bool
) -> Unsharded:
    """Unsharded parameters at stage 3.

    Resident and persistent units stay. Beside them the unit in use and the next ones are unsharded,
    never more than the two largest; of the others, the first is used last, and alone. A rank
    without samples only takes part in collectives: it frees each unit at once, and unshards the
    next one before it reduces this one.
    """
    sizes = model.parameter_bytes
    resident = set(model.resident_units)
    turns = len(backward.turns)
    inner = turns - (backward.resident_turn is not None)
    if not samples:
        held = sum(sizes[unit] for unit in persistent)
        passing = [size for unit, size in enumerate(sizes) if unit not in persistent]
        others = [sizes[unit] for unit in range(len(sizes)) if unit not in resident | {*persistent}]
        most = held + max(others, default=0.0)
        by_turn = [most if turn + 1 < inner else held for turn in range(turns)]
        return Unsharded(held + max(passing, default=0.0), by_turn, [held] * turns)
    staying = resident | {*persistent}
    held = sum(sizes[unit] for unit in staying)
    passing = sorted(size for unit, size in enumerate(sizes) if unit not in staying)
    both = held + sum(passing[-2:])
    first = next((unit for unit in range(len(sizes)) if unit not in resident), None)
    alone = held + (sizes[first] if first is not None and first not in staying else 0.0)
    by_turn = [both if turn + 1 < inner else alone for turn in range(turns)]
    return Unsharded(both, by_turn, by_turn)


def elements_of(model: ModelProfile, stage: int, ranks: int, keeps: str, sent: Sent) -> PerElement:
    """What an element of the gradients takes at a stage."""
    times = ranks if keeps == "freed" else ranks - 1  # devices also receive their own slice
    parts = times * sent.received
    received = Bytes(0.0, parts) if stage else Bytes(parts / ranks)
    sums = Bytes(ACCUMULATOR_BYTES + SQUARES_BYTES / ranks)
    if stage == 1:
        sums = Bytes(ACCUMULATOR_BYTES, SQUARES_BYTES)
    elif stage >= 2:
        sums = Bytes(0.0, ACCUMULATOR_BYTES + SQUARES_BYTES)
    copies = Bytes(sent.bucket), received, Bytes(sent.gathered)
    return PerElement(model.grad_bytes, sums, *copies)


def highest_of_each_kind(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments that may be the maximum for some share, whatever their turn adds to them."""
    by_kind: dict[tuple[int | None, bool, bool], list[Bytes]] = {}
    for moment in moments:
        kind = (moment.turn, moment.packed, moment.ended)
        by_kind.setdefault(kind, []).append(moment.needed)
    return tuple(Moment(line, *kind) for kind, own in by_kind.items() for line in highest(own))


def highest(lines: Iterable[Bytes]) -> tuple[Bytes, ...]:
    """The lines that are the maximum for some share from 0 to 1, and maybe a few others."""
    best = -math.inf
    kept = []
    for line in sorted(lines, reverse=True):
        if line.fixed + line.per_share > best:
            best = line.fixed + line.per_share
            kept.append(line)
    return tuple(kept)
