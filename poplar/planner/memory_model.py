"""What a plan needs of each rank's memory, term by term, in bytes.

For one rank at one stage everything but the activations is linear in its share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

from poplar.profile import ClusterProfile, DeviceProfile, ModelProfile

ACCUMULATOR_BYTES = 4.0
"""Per element: gradients are accumulated in fp32."""
BUCKET_ELEMENTS = 32 * 2**20 // 4
"""Larger units are reduced in several buckets of this many elements."""
_MIN_IN_FLIGHT = 2
_SLACK_BYTES = 1.0
"""Tolerance for the rounding of shares."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank at one stage: `needed = fixed + per_share * share + activations(micro_batch)`."""

    device: DeviceProfile
    fixed: float
    """Bytes without samples and without a share."""
    per_share: float
    """Bytes that owning the whole state adds."""
    limit: float
    """Bytes that a plan may use: the device's memory without the reserve."""

    def needed(self, micro_batch: int, share: float) -> float:
        """Bytes with this share and passes of at most this many samples."""
        activations = self.device.activation_bytes(micro_batch)
        return self.fixed + self.per_share * share + activations

    def fits(self, micro_batch: int, share: float) -> bool:
        """Whether `needed` is within the limit, up to one byte."""
        return self.needed(micro_batch, share) <= self.limit + _SLACK_BYTES

    def largest_share(self, micro_batch: int) -> float:
        """The largest share, up to 1, that fits beside this micro-batch; `-inf`: none fits."""
        room = self.limit + 0.5 * _SLACK_BYTES - self.needed(micro_batch, 0.0)
        if room < 0.0:
            return -math.inf
        return min(1.0, room / self.per_share) if self.per_share else 1.0

    def largest_batch(self, share: float, at_most: int) -> int:
        """The largest micro-batch, up to `at_most`, that fits; -1: not even 0 samples fit."""
        sizes = range(min(at_most, self.device.max_batch) + 1)
        return bisect_left(sizes, True, key=lambda size: not self.fits(size, share)) - 1


def rank_memory(
    cluster: ClusterProfile, stage: int, rank: int, persistent: Collection[int] = ()
) -> RankMemory:
    """The memory of `rank` at `stage`; `persistent` units stay unsharded between passes."""
    device, model = cluster.devices[rank], cluster.model
    ranks = cluster.world_size
    state, state_per_share = _state(model, stage)
    buckets, buckets_per_share = _buckets(model, stage, ranks)
    return RankMemory(
        device=device,
        fixed=(
            state
            + buckets
            + _relayed(cluster, stage)
            + _unsharded(model, stage, persistent)
            + model.grad_bytes * max(model.unit_numels)  # of one unit, before they are packed
            + model.frozen_bytes
            + device.held_bytes
        ),
        per_share=state_per_share + buckets_per_share,
        limit=device.memory_bytes * (1.0 - cluster.memory_reserve),
    )


def _state(model: ModelProfile, stage: int) -> tuple[float, float]:
    """Parameters, accumulator and optimizer state: bytes on every rank, and bytes per share."""
    by_sharding = (model.optimizer_bytes, ACCUMULATOR_BYTES, model.param_bytes)
    whole, sharded = sum(by_sharding[stage:]), sum(by_sharding[:stage])
    frozen = model.param_bytes * model.frozen_numel
    if stage < 3:
        return whole * model.numel + frozen, sharded * model.numel
    return whole * model.numel, sharded * model.numel + frozen


def _unsharded(model: ModelProfile, stage: int, persistent: Collection[int]) -> float:
    """Unsharded parameters at stage 3: resident and persistent units, and the two largest others
    (the current unit and the next).
    """
    if stage < 3:
        return 0.0
    frozen = model.unit_frozen_numels or (0,) * len(model.unit_numels)
    sizes = [sum(both) for both in zip(model.unit_numels, frozen, strict=True)]
    staying = {*model.resident_units, *persistent}
    others = sorted(size for unit, size in enumerate(sizes) if unit not in staying)
    return model.param_bytes * (sum(sizes[unit] for unit in staying) + sum(others[-2:]))


def _relayed(cluster: ClusterProfile, stage: int) -> float:
    """What the hierarchical transport adds: a collective's buffer in the order of the host's ranks.

    One collective at a time: a bucket, the sums that it sends on, and gathered parameters.
    """
    model = cluster.model
    if not cluster.network.hosts:
        return 0.0
    return (2.0 * model.wire_bytes + model.param_bytes) * _flat_numel(model, stage)


def _flat_numel(model: ModelProfile, stage: int) -> int:
    """Elements of the largest buffer that is reduced at once."""
    if model.largest_flat_numels:
        return model.largest_flat_numels[stage]
    return min(max(model.unit_numels), BUCKET_ELEMENTS)


def _buckets(model: ModelProfile, stage: int, ranks: int) -> tuple[float, float]:
    """Packed and received buckets in flight: bytes on every rank, and bytes per share."""
    numel = _flat_numel(model, stage)
    in_flight = _MIN_IN_FLIGHT * numel
    if stage >= 2:
        in_flight = max(in_flight, max(model.unit_numels) + numel)
    bucket = model.wire_bytes * min(in_flight, math.ceil(model.numel / numel) * numel)
    if stage >= 2:
        return bucket, bucket * ranks  # some transports also receive the rank's own part
    # A wire dtype as wide as the accumulator needs no packed copy.
    packed = bucket if model.wire_bytes < ACCUMULATOR_BYTES else 0.0
    return (packed, bucket * ranks) if stage == 1 else (packed + bucket, 0.0)
