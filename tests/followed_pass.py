"""A naive reference for predicted peaks: one pass and the update, allocation by allocation.

Values only: a plain list of what is alive. `test_peak_memory.py` compares the planner with what the
engine itself allocates.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from poplar.values.profile import ClusterProfile, ModelProfile

BUFFER = 32 * 2**20 // 4
"""Elements that are reduced at once."""


@dataclass
class FollowedPass:
    """The allocations of one rank; `peak` is the most bytes at any time."""

    cluster: ClusterProfile
    stage: int
    share: float
    samples: int
    persistent: frozenset[int]
    during: Sequence[float]
    """By unit, activation bytes while its backward runs."""
    after: Sequence[float]
    """By unit, activation bytes when its backward is over."""
    state: float
    live: dict[object, float] = field(default_factory=dict)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    """Number and elements of reductions that have not been waited for."""
    peak: float = 0.0

    def __post_init__(self) -> None:
        self.live["state"] = self.state
        self.numbers = itertools.count()
        resident = sorted(self.model.resident_units)
        others = [u for u in range(len(self.model.unit_numels)) if u not in resident]
        self.turns = [[unit] for unit in reversed(others)] + ([resident] if resident else [])
        self.flats = flats_of(self.model, self.stage, [*resident, *others])
        turn_of = {unit: turn for turn, units in enumerate(self.turns) for unit in units}
        self.complete = [max(turn_of[unit] for unit in flat) for flat in self.flats]
        numbers = reversed(range(len(self.flats)))
        self.order = sorted(numbers, key=self.complete.__getitem__)
        # Buffers of each unit of the engine, of which all that is resident is one at stage 3.
        one = frozenset(resident) if self.stage == 3 else frozenset()
        of_units = Counter(one if one.issuperset(flat) else frozenset(flat) for flat in self.flats)
        self.limit = 2 if self.stage < 2 else max(2, 1 + max(of_units.values()))

    @property
    def model(self) -> ModelProfile:
        return self.cluster.model

    @property
    def is_last_turn_resident(self) -> bool:
        return bool(self.model.resident_units)

    def run(self, *, later: bool) -> float:
        """The peak of a pass, and of the update after it."""
        self.begin(later)
        for turn, units in enumerate(self.turns):
            at_end = self.is_last_turn_resident and turn == len(self.turns) - 1
            self.live["unsharded"] = self.unsharded("at end" if at_end else "during", turn)
            self.allocate_gradients(turn)
            self.note(self.during[units[0]])
            self.live["unsharded"] = self.unsharded("at end" if at_end else "packed", turn)
            for flat in self.order:
                if self.complete[flat] == turn:
                    inner = self.is_inner(flat)
                    self.reduce(flat, (self.during if inner else self.after)[units[0]])
        self.live["unsharded"] = 0.0
        while self.in_flight:
            self.wait_for_oldest()
        self.note()
        return self.peak

    def is_inner(self, flat: int) -> bool:
        """Whether a unit that ends together with this flat begins in another one before it."""
        last = [unit for unit in self.flats[flat] if unit in self.turns[self.complete[flat]]]
        begun = {unit for before in self.flats[:flat] for unit in before}
        turn = self.turns[self.complete[flat]]
        return any(unit in begun for unit in (turn if len(turn) > 1 else last))

    def begin(self, later: bool) -> None:
        """What earlier passes of the step, or earlier steps, have left."""
        in_flight = later and self.stage >= 2
        if in_flight or self.cluster.network.receive_buffers == "kept":
            for flat in self.order:
                self.send(flat)
        while self.in_flight and not in_flight:
            self.wait_for_oldest()
        if later:
            for flat in range(len(self.flats)):
                self.allocate_sums(flat)
        self.live["unsharded"] = self.unsharded("before")
        self.note()

    def note(self, activations: float = 0.0) -> None:
        self.peak = max(self.peak, sum(self.live.values()) + activations)

    def allocate_gradients(self, turn: int) -> None:
        """Of a turn's unit; those of resident units are there from the beginning."""
        resident = self.model.resident_units
        for flat, parts in enumerate(self.flats):
            for unit, numel in parts.items():
                if self.samples and (unit in self.turns[turn] or (turn == 0 and unit in resident)):
                    self.live["gradient", flat, unit] = self.model.grad_bytes * numel

    def reduce(self, flat: int, activations: float) -> None:
        """Pack the gradients of a flat, free them, and send the bucket."""
        numel = sum(self.flats[flat].values())
        if self.stage < 2:
            self.allocate_sums(flat)
            self.note(activations)
        else:
            while len(self.in_flight) >= self.limit:
                self.wait_for_oldest()
            self.live["packing"] = self.model.wire_bytes * numel
            self.note(activations)
            del self.live["packing"]
        for unit in self.flats[flat]:
            self.live.pop(("gradient", flat, unit), None)
        self.allocate_sums(flat)
        self.send(flat)
        self.note(activations)

    def allocate_sums(self, flat: int) -> None:
        whole = 1.0 if self.stage < 2 else self.share
        own = 1.0 / self.cluster.world_size if self.stage == 0 else self.share
        self.live["sums", flat] = sum(self.flats[flat].values()) * (4 * whole + 4 / 64 * own)

    def send(self, flat: int) -> None:
        """A bucket, and memory for the parts of the other ranks."""
        while len(self.in_flight) >= self.limit:
            self.wait_for_oldest()
        number, numel = next(self.numbers), sum(self.flats[flat].values())
        model, ranks = self.model, self.cluster.world_size
        if self.stage >= 2 or model.wire_bytes < 4:
            self.live["bucket", number] = model.wire_bytes * numel
        keeps = self.cluster.network.receive_buffers != "freed"
        own = 1.0 / ranks if self.stage == 0 else self.share
        received = numel * own * model.wire_bytes * (ranks - keeps)
        idle = [key for key in self.live if key[:2] == ("idle", numel)]
        if idle:
            del self.live[idle[0]]
        self.live["received", number] = received
        self.in_flight.append((number, numel))

    def wait_for_oldest(self) -> None:
        number, numel = self.in_flight.pop(0)
        self.live.pop(("bucket", number), None)
        received = self.live.pop(("received", number))
        if self.cluster.network.receive_buffers != "freed":
            self.live["idle", numel, number] = received

    def unsharded(self, when: str, turn: int = 0) -> float:
        """Parameters that are unsharded, at stage 3."""
        if self.stage < 3:
            return 0.0
        model = self.model
        frozen = model.unit_frozen_bytes or (0,) * len(model.unit_numels)
        both = zip(model.unit_numels, frozen, strict=True)
        sizes = {unit: model.param_bytes * own + rest for unit, (own, rest) in enumerate(both)}
        resident, persistent = set(model.resident_units), set(self.persistent)
        held = sum(sizes[unit] for unit in persistent)
        if not self.samples:
            passing = {"before": set(sizes), "during": set(sizes) - resident}.get(when, set())
            if when == "during" and turn == len(set(sizes) - resident) - 1:
                passing = set()  # the first unit was unsharded before the reduction of the second
            return held + max((sizes[unit] for unit in passing - persistent), default=0.0)
        held += sum(sizes[unit] for unit in resident - persistent)
        others = [unit for unit in sizes if unit not in resident]
        if when == "before" or turn < len(others) - 1:
            passing = [sizes[unit] for unit in others if unit not in persistent]
            return held + sum(sorted(passing)[-2:])
        return held + sum(sizes[unit] for unit in others[:1] if unit not in persistent)


def flats_of(model: ModelProfile, stage: int, order: Sequence[int]) -> list[dict[int, int]]:
    """Elements by unit of each buffer that is reduced at once."""
    numels = model.unit_numels
    groups: list[list[int]] = []
    for unit in order:
        both = [*groups[-1], unit] if groups else [unit]
        if groups and stage < 3 and sum(numels[other] for other in both) <= BUFFER:
            groups[-1] = both
        else:
            groups.append([unit])
    flats = []
    for group in groups:
        if len(group) > 1:
            # A unit with nothing to train has no gradients to wait for.
            flats.append({unit: numels[unit] for unit in group if numels[unit]})
            continue
        left = numels[group[0]]
        while left:
            flats.append({group[0]: min(left, BUFFER)})
            left -= min(left, BUFFER)
    return flats
