"""What a plan needs of each rank's memory, in bytes: the most at any moment of a step.

At each moment (`memory_moments`) everything but the activations is linear in the rank's share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from poplar.planner.memory_moments import (
    Backward,
    Bytes,
    Moment,
    Pass,
    Unsharded,
    elements_of,
    highest,
    highest_of_each_kind,
    reduced_in_every_pass,
    reduced_once,
    unsharded_in,
)
from poplar.profile import ClusterProfile, DeviceProfile, ModelProfile

SLACK_BYTES = 1.0
"""Tolerance for the rounding of shares."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank at one stage: the most over moments of `fixed + per_share * share + activations`.

    [Note: passes and the search]
    `needed_by` is exact in the passes. The search chooses the largest micro-batch before the number
    of passes, so it uses `needed`, the memory of a pass that is not the first of its step: that has
    the sums of earlier ones beside it. Never less than `needed_by`; the same with several passes.
    """

    device: DeviceProfile
    state: Bytes
    """What is always held."""
    backward: Backward = field(repr=False)
    moments: Callable[[Pass], tuple[Moment, ...]] = field(repr=False)
    """Of a kind of pass."""
    unsharded: Callable[[bool], Unsharded] | None = field(repr=False)
    """Unsharded parameters of a pass with or without samples; None where they are never sharded."""
    limit: float
    """Bytes that a plan may use: the device's memory without the reserve."""
    _lines: dict[tuple[bool, int], tuple[Bytes, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def needed(self, micro_batch: int, share: float) -> float:
        """Bytes with this share and any number of passes of at most this many samples."""
        return self._needed(self._lines_of(True, micro_batch), share)

    def needed_by(self, passes: Sequence[int], share: float) -> float:
        """Bytes with this share and these passes of a step, by their samples."""
        first, *rest = passes or (0,)
        needed = self._needed(self._lines_of(False, first), share)
        return max(needed, self.needed(max(rest), share)) if rest else needed

    def fits(self, micro_batch: int, share: float) -> bool:
        """Whether `needed` is within the limit, up to one byte."""
        return self.needed(micro_batch, share) <= self.limit + SLACK_BYTES

    def largest_share(self, micro_batch: int) -> float:
        """The largest share, up to 1, that fits beside this micro-batch; `-inf`: none fits."""
        largest = 1.0
        for line in self._lines_of(True, micro_batch):
            room = self.limit + 0.5 * SLACK_BYTES - line.fixed
            if room < 0.0:
                return -math.inf
            if line.per_share:
                largest = min(largest, room / line.per_share)
        return largest

    def largest_batch(self, share: float, at_most: int) -> int:
        """The largest micro-batch, up to `at_most`, that fits; -1: not even 0 samples fit."""
        sizes = range(min(at_most, self.device.max_batch) + 1)
        return bisect_left(sizes, True, key=lambda size: not self.fits(size, share)) - 1

    def _needed(self, lines: Sequence[Bytes], share: float) -> float:
        return max(line.fixed + line.per_share * share for line in lines)

    def _lines_of(self, later: bool, micro_batch: int) -> tuple[Bytes, ...]:
        """The moments of a pass with this many samples that are the highest for some share."""
        key = later, micro_batch
        if key not in self._lines:
            own = Pass(later=later, samples=micro_batch > 0)
            self._lines[key] = highest(self._lines_at(own, micro_batch))
        return self._lines[key]

    def _lines_at(self, own: Pass, micro_batch: int) -> Iterator[Bytes]:
        """The moments of a pass that may be the highest."""
        unsharded = None if self.unsharded is None else self.unsharded(own.samples)
        during, ended = self._activations(micro_batch)
        state, per_share = self.state
        for moment in self.moments(own):
            fixed = state + moment.needed.fixed
            if moment.turn is not None and moment.turn >= 0:
                fixed += (ended if moment.ended else during)[moment.turn]
            if unsharded is not None:
                fixed += unsharded.at(moment)
            yield Bytes(fixed, per_share + moment.needed.per_share)

    def _activations(self, micro_batch: int) -> tuple[Sequence[float], Sequence[float]]:
        """By turn, activation bytes during a backward and when it has ended; the peak of the pass
        if they were not measured.
        """
        turns = self.backward.turns
        during, after = self.device.unit_bytes(micro_batch)
        if not during:
            whole = [self.device.activation_bytes(micro_batch)] * len(turns)
            return whole, whole
        return [during[unit] for unit in turns], [after[unit] for unit in turns]


def rank_memory(
    cluster: ClusterProfile, stage: int, rank: int, persistent: Collection[int] = ()
) -> RankMemory:
    """The memory of `rank` at `stage`; `persistent` units stay unsharded between passes."""
    device, model = cluster.devices[rank], cluster.model
    ranks, keeps = cluster.world_size, cluster.network.receive_buffers
    always = Bytes(_relayed(cluster, stage) + model.frozen_bytes + device.held_bytes)
    return RankMemory(
        device=device,
        state=_state(model, stage).plus(always),
        backward=_backward(model, stage),
        moments=partial(_moments, model, stage, ranks, keeps),
        unsharded=partial(_unsharded, model, frozenset(persistent)) if stage == 3 else None,
        limit=device.memory_bytes * (1.0 - cluster.memory_reserve),
    )


@lru_cache(64)
def _backward(model: ModelProfile, stage: int) -> Backward:
    return Backward.of(model, stage)


@lru_cache(256)
def _moments(
    model: ModelProfile, stage: int, ranks: int, keeps: str, own: Pass
) -> tuple[Moment, ...]:
    """The moments of a kind of pass that may be the highest."""
    backward, each = _backward(model, stage), elements_of(model, stage, ranks, keeps)
    kind = reduced_once if stage < 2 else reduced_in_every_pass
    return highest_of_each_kind(kind(backward, each, own, keeps))


@lru_cache(256)
def _unsharded(model: ModelProfile, persistent: frozenset[int], samples: bool) -> Unsharded:
    return unsharded_in(model, _backward(model, 3), persistent, samples=samples)


def _state(model: ModelProfile, stage: int) -> Bytes:
    """Parameters and optimizer state."""
    trained, frozen = model.param_bytes * model.numel, model.param_bytes * model.frozen_numel
    optimizer = model.optimizer_bytes * model.numel
    if stage == 0:
        return Bytes(trained + frozen + optimizer)
    if stage < 3:
        return Bytes(trained + frozen, optimizer)
    return Bytes(0.0, trained + frozen + optimizer)


def _relayed(cluster: ClusterProfile, stage: int) -> float:
    """What the hierarchical transport adds: a collective's buffer in the order of the host's ranks.

    One collective at a time: a bucket, the sums that it sends on, and gathered parameters.
    """
    model = cluster.model
    if not cluster.network.hosts:
        return 0.0
    largest = max(flat.numel for flat in _backward(model, stage).flats)
    return (2.0 * model.wire_bytes + model.param_bytes) * largest
