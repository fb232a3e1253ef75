"""What a plan needs of each rank's memory, in bytes: the most at any moment of a step.

At each moment (`step.moments`) everything but the activations is linear in the rank's share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from poplar.step.moments import (
    ACCUMULATOR_BYTES,
    Backward,
    Bytes,
    Moment,
    Pass,
    Sent,
    elements_of,
    highest,
    highest_of_each_kind,
    moments_of,
    unsharded_in,
)
from poplar.values.communication import encoded_bytes
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS
from poplar.values.profile import ClusterProfile, DeviceProfile, ModelProfile

SLACK_BYTES = 1.0
"""Tolerance for the rounding of shares."""


class Caps(NamedTuple):
    """The largest micro-batches of a rank, by their place in the step."""

    first: int
    """Of the first pass."""
    later: int = -1
    """Of the passes after it; -1: there are none."""

    @classmethod
    def of(cls, passes: Sequence[int]) -> Caps:
        """Those of these passes."""
        return cls(passes[0], max(passes[1:], default=-1)) if passes else cls(0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank at one stage: the most over moments of `fixed + per_share * share + activations`.

    A pass that is not the first of its step has the sums of earlier passes beside it, so it needs
    more memory than the first one with as many samples.
    """

    device: DeviceProfile
    state: tuple[Bytes, ...]
    """What is always held: the most of these."""
    turns: tuple[int, ...]
    """Units in the order of the backward."""
    moments: Callable[[Pass, bool], tuple[_Moment, ...]] = field(repr=False)
    """Of a kind of pass; with True, moments in different turns of the backward are told apart."""
    limit: float
    """Bytes that a plan may use: the device's memory without the reserve."""
    _lines: dict[tuple[bool, int], tuple[Bytes, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _shares: dict[tuple[bool, int], float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @property
    def is_too_small(self) -> bool:
        """What is always held does not fit, so no plan does. Computes no moments."""
        return max(state.fixed for state in self.state) > self.limit + SLACK_BYTES

    def needed(self, caps: Caps, share: float) -> float:
        """Bytes with this share and passes of these sizes."""
        needed = self._needed(False, caps.first, share)
        return needed if caps.later < 0 else max(needed, self._needed(True, caps.later, share))

    def fits(self, caps: Caps, share: float) -> bool:
        """Whether `needed` is within the limit, up to one byte."""
        return self.needed(caps, share) <= self.limit + SLACK_BYTES

    def largest_share(self, caps: Caps) -> float:
        """The largest share, up to 1, that fits beside these passes; `-inf`: none fits."""
        largest = self._largest_share(False, caps.first)
        return largest if caps.later < 0 else min(largest, self._largest_share(True, caps.later))

    def largest_shares(self, at_most: int, *, later: bool) -> list[float]:
        """The largest shares that fit beside a pass of 0, 1, ... `at_most` samples."""
        return [self._largest_share(later, size) for size in range(at_most + 1)]

    def largest_caps(self, share: float, at_most: int) -> Caps:
        """The largest micro-batches, up to `at_most`, that fit; -1: not even 0 samples fit."""
        most = self.limit + SLACK_BYTES
        return self._largest(at_most, lambda later, size: self._needed(later, size, share) <= most)

    def caps_above(self, share: float, at_most: int) -> Caps:
        """The largest micro-batches, up to `at_most`, that fit beside a share above this one."""
        return self._largest(at_most, lambda later, size: self._largest_share(later, size) > share)

    def middle_share(self, caps: Caps, share: float) -> float:
        """A share below this one, beside which these caps do not fit, but not below the largest one
        beside which they do: the sizes that it excludes are about half of those that do not fit.
        """
        over = max(
            (later for later, size in enumerate(caps) if size >= 0),
            key=lambda later: self._needed(bool(later), caps[later], share),
        )
        middle = (self.largest_caps(share, caps[over])[over] + caps[over] + 1) // 2
        return self._largest_share(bool(over), middle)

    def _largest(self, at_most: int, fits: Callable[[bool, int], bool]) -> Caps:
        """The largest micro-batches up to `at_most`; `fits` tells of a later pass and its size."""
        sizes = range(min(at_most, self.device.max_batch) + 1)

        def largest(later: bool) -> int:
            return bisect_left(sizes, True, key=lambda size: not fits(later, size)) - 1

        return Caps(largest(False), largest(True))

    def _needed(self, later: bool, micro_batch: int, share: float) -> float:
        lines = self._lines_of(later, micro_batch)
        return max(line.fixed + line.per_share * share for line in lines)

    def _largest_share(self, later: bool, micro_batch: int) -> float:
        key = later, micro_batch
        if key not in self._shares:
            self._shares[key] = self._limited_share(self._lines_of(later, micro_batch))
        return self._shares[key]

    def _limited_share(self, lines: Iterable[Bytes]) -> float:
        """The largest share, up to 1, with which these lines are within the limit."""
        largest = 1.0
        for line in lines:
            room = self.limit + 0.5 * SLACK_BYTES - line.fixed
            if room < 0.0:
                return -math.inf
            if line.per_share:
                largest = min(largest, room / line.per_share)
        return largest

    def _lines_of(self, later: bool, micro_batch: int) -> tuple[Bytes, ...]:
        """The moments of a pass with this many samples that are the highest for some share."""
        key = later, micro_batch
        if key not in self._lines:
            own = Pass(later=later, samples=micro_batch > 0)
            self._lines[key] = highest(self._lines_at(own, micro_batch))
        return self._lines[key]

    def _lines_at(self, own: Pass, micro_batch: int) -> Iterator[Bytes]:
        """The moments of a pass that may be the highest."""
        during, ended = self.device.unit_bytes(micro_batch)
        whole = 0.0 if during else self.device.activation_bytes(micro_batch)
        for needed, turn, has_ended in self.moments(own, bool(during)):
            activations = 0.0
            if turn is not None:
                activations = (
                    (ended if has_ended else during)[self.turns[turn]] if during else whole
                )
            for state in self.state:
                yield state.plus(needed, Bytes(activations))


class _Moment(NamedTuple):
    """What is alive at one time, besides the state and activations."""

    needed: Bytes
    turn: int | None
    """In which turn of the backward; None: without activations."""
    ended: bool
    """The unit's backward is over."""


def rank_memory(
    cluster: ClusterProfile, stage: int, rank: int, persistent: Collection[int] = ()
) -> RankMemory:
    """The memory of `rank` at `stage`; `persistent` units stay unsharded between passes."""
    device, model = cluster.devices[rank], cluster.model
    ranks, keeps = cluster.world_size, cluster.network.receive_buffers
    always = _relayed(cluster, stage).plus(Bytes(model.frozen_bytes + device.held_bytes))
    always = always.plus(_encoded_parameters(cluster, stage))
    return RankMemory(
        device=device,
        state=tuple(state.plus(always) for state in _states(device, model, stage)),
        turns=_backward(model, stage).turns,
        moments=partial(
            _moments,
            model,
            stage,
            ranks,
            keeps,
            sent_gradients(cluster, stage),
            frozenset(persistent),
        ),
        limit=device.memory_bytes * (1.0 - cluster.memory_reserve),
    )


def _encoded_parameters(cluster: ClusterProfile, stage: int) -> Bytes:
    """What is held to send encoded parameters.

    At stages 1 and 2 an owner has fp32 values beside those that all ranks compute with, and a copy
    of the latter. Stage 3 receives the codes of a unit beside its values.
    """
    model, sent = cluster.model, cluster.communication.at(stage).parameters
    if sent == "exact" or cluster.world_size == 1:
        return Bytes()
    if stage < FIRST_STAGE_SHARDING_PARAMETERS:
        masters = ACCUMULATOR_BYTES if model.param_bytes >= ACCUMULATOR_BYTES else 0.0
        return Bytes(0.0, (masters + model.param_bytes) * model.numel)
    return Bytes(encoded_bytes(sent) * max(model.unit_numels))


def sent_gradients(cluster: ClusterProfile, stage: int) -> tuple[Sent, ...]:
    """How gradients are sent in the training: exactly in the first steps, if there is a warm-up."""
    communication, on_host = cluster.communication, bool(cluster.network.hosts)
    precisions = {communication.gradients: None}
    if communication.warmup_steps:
        precisions["exact"] = None
    return tuple(
        Sent.of(cluster.model, stage, precision, adds_on_host=on_host) for precision in precisions
    )


@lru_cache(64)
def _backward(model: ModelProfile, stage: int) -> Backward:
    return Backward.of(model, stage)


@lru_cache(512)
def _moments(
    model: ModelProfile,
    stage: int,
    ranks: int,
    keeps: str,
    sent: tuple[Sent, ...],
    persistent: frozenset[int],
    own: Pass,
    by_turn: bool,
) -> tuple[_Moment, ...]:
    """The moments of a kind of pass that may be the highest, with the unsharded parameters."""
    unsharded = None
    if stage == 3:
        unsharded = unsharded_in(model, _backward(model, 3), persistent, samples=own.samples)
    by_kind: dict[tuple[int | None, bool], list[Bytes]] = {}
    for moment in _gradients(model, stage, ranks, keeps, sent, own):
        in_backward = moment.turn is not None and moment.turn >= 0
        kind = (moment.turn if by_turn else 0, moment.ended) if in_backward else (None, False)
        parameters = Bytes(unsharded.at(moment) if unsharded else 0.0)
        by_kind.setdefault(kind, []).append(moment.needed.plus(parameters))
    return tuple(_Moment(line, *kind) for kind, lines in by_kind.items() for line in highest(lines))


@lru_cache(256)
def _gradients(
    model: ModelProfile, stage: int, ranks: int, keeps: str, sent: tuple[Sent, ...], own: Pass
) -> tuple[Moment, ...]:
    """The moments of a kind of pass that may be the highest, without unsharded parameters."""
    backward = _backward(model, stage)
    each = (elements_of(model, stage, ranks, keeps, one) for one in sent)
    moments = (moments_of(backward, one, own, keeps, every_pass=stage >= 2) for one in each)
    return highest_of_each_kind(chain.from_iterable(moments))


def _states(device: DeviceProfile, model: ModelProfile, stage: int) -> Iterator[Bytes]:
    """Parameters and the optimizer state that is on the device: the most of these.

    The state that a plan keeps on the host is at most what fits in the host's memory.
    """
    parameters, state = sum(model.parameter_bytes), model.optimizer_bytes * model.numel
    yield _state(parameters, state * (1.0 - device.state_on_host), stage)
    if device.state_on_host:
        on_host = device.host_memory_bytes * model.optimizer_bytes / model.host_state_bytes
        yield _state(parameters, state, stage).plus(Bytes(-on_host))


def _state(parameters: float, optimizer: float, stage: int) -> Bytes:
    """Parameters and optimizer state, by what a stage shards."""
    if stage == 0:
        return Bytes(parameters + optimizer)
    if stage < 3:
        return Bytes(parameters, optimizer)
    return Bytes(0.0, parameters + optimizer)


def _relayed(cluster: ClusterProfile, stage: int) -> Bytes:
    """What the hierarchical transport adds: a collective's buffer in the order of the host's ranks.

    One collective at a time: a bucket, the sums that it sends on, and gathered parameters. Devices
    allocate all of a reduction before its first call: beside the bucket, what the host's ranks send
    of the slice that this rank sums for its host, and those sums in fp32 and as they are sent on.
    A rank of the smallest host sums the most; equal devices on other hosts count as much. A rank
    receives the sums of its slice from every other host. From three hosts on, it also copies the
    slice of parameters that it sends, once for each of them.
    """
    model, hosts = cluster.model, cluster.network.hosts
    if not hosts:
        return Bytes()
    largest = max(flat.numel for flat in _backward(model, stage).flats)
    # What is encoded are fp32 sums of the host; it takes less than they do.
    wire = max(one.received for one in sent_gradients(cluster, stage))
    reduced, own = 2.0 * wire, 0.0
    if cluster.network.receive_buffers == "freed":
        on_host = min(map(hosts.count, set(hosts)))
        received = wire if on_host > 1 else 0.0
        sums = (ACCUMULATOR_BYTES + wire) / on_host
        reduced = wire + received + sums
        others = len(set(hosts)) - 1
        own = others * (wire + (model.param_bytes if others > 1 else 0.0))
    return Bytes(reduced + model.param_bytes, own).times(largest)
