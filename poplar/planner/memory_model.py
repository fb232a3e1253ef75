"""What a plan needs of each rank's memory, term by term.

For one rank at one stage everything but the activations is a straight line in its share, so the
largest share that a micro-batch leaves room for, and the largest micro-batch that a share leaves
room for, are one division away. Bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from poplar.profile import ClusterProfile, DeviceProfile, ModelProfile

ACCUMULATOR_BYTES = 4.0
"""Per element: gradients are accumulated in fp32."""
BUCKET_ELEMENTS = 32 * 2**20 // 4
"""Larger units are reduced in several buckets of this many elements."""
_LEAST_IN_FLIGHT = 2
_SUMS_BYTES = 4.0
"""Per element of what gradients are added up in; wire of fewer bytes needs a bucket of its own."""
_SLACK_BYTES = 1.0
"""What rounding of a share may add; a plan that needs a byte too much fits."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank at one stage: `needed = fixed + per_share * share + activations(micro_batch)`."""

    device: DeviceProfile
    fixed: float
    """Bytes without samples and without a share."""
    per_share: float
    """Bytes that owning everything adds."""
    limit: float
    """Bytes that a plan may use: the device's, less the reserve."""

    def needed(self, micro_batch: int, share: float) -> float:
        """Bytes with this share and passes of at most this many samples."""
        activations = self.device.activation_bytes(micro_batch)
        return self.fixed + self.per_share * share + activations

    def fits(self, micro_batch: int, share: float) -> bool:
        """Whether that is within the limit, to a byte."""
        return self.needed(micro_batch, share) <= self.limit + _SLACK_BYTES

    def largest_share(self, micro_batch: int) -> float:
        """The largest share, up to 1, that leaves room for this micro-batch; `-inf`: none does."""
        room = self.limit + 0.5 * _SLACK_BYTES - self.needed(micro_batch, 0.0)
        if room < 0.0:
            return -math.inf
        return min(1.0, room / self.per_share) if self.per_share else 1.0

    def largest_batch(self, share: float, at_most: int) -> int:
        """The largest micro-batch, up to `at_most`, that this share leaves room for.

        -1 if even a rank without samples does not fit.
        """
        low, high = -1, min(at_most, self.device.max_batch)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, share) else (low, middle - 1)
        return low


def rank_memory(
    cluster: ClusterProfile, stage: int, rank: int, persistent: Collection[int] = ()
) -> RankMemory:
    """What `rank` needs at `stage`, as a function of its micro-batch and its share.

    `kept` are units that stay gathered between the passes of a step.
    """
    device, model = cluster.devices[rank], cluster.model
    ranks = cluster.world_size
    state, state_per_share = _state(model, stage)
    buckets, buckets_per_share = _buckets(model, stage, ranks)
    return RankMemory(
        device=device,
        fixed=(
            state
            + buckets
            + _gathered(model, stage, persistent)
            + _native_gradients(model)
            + model.frozen_bytes
            + device.held_bytes
        ),
        per_share=state_per_share + buckets_per_share,
        limit=device.memory_bytes * (1.0 - cluster.memory_reserve),
    )


def _state(model: ModelProfile, stage: int) -> tuple[float, float]:
    """Parameters, accumulator and optimizer state: whole on every rank, and what a share adds."""
    by_sharding = (model.optimizer_bytes, ACCUMULATOR_BYTES, model.param_bytes)
    whole, sharded = sum(by_sharding[stage:]), sum(by_sharding[:stage])
    frozen = model.param_bytes * model.frozen_numel
    if stage < 3:
        return whole * model.numel + frozen, sharded * model.numel
    return whole * model.numel, sharded * model.numel + frozen


def _gathered(model: ModelProfile, stage: int, persistent: Collection[int]) -> float:
    """Parameters that are gathered where they are sharded.

    This unit's and the next one's, beside those that stay gathered.
    """
    if stage < 3:
        return 0.0
    frozen = model.unit_frozen_numels or (0,) * len(model.unit_numels)
    sizes = [sum(both) for both in zip(model.unit_numels, frozen, strict=True)]
    staying = {*model.resident_units, *persistent}
    others = [size for unit, size in enumerate(sizes) if unit not in staying]
    stays = sum(sizes[unit] for unit in staying)
    return model.param_bytes * (stays + sum(sorted(others)[-2:]))


def _native_gradients(model: ModelProfile) -> float:
    """Gradients of one unit as the backward leaves them, before they are packed."""
    return model.grad_bytes * max(model.unit_numels)


def _buckets(model: ModelProfile, stage: int, ranks: int) -> tuple[float, float]:
    """Buckets on their way: packed and received, whatever the share and what a share adds."""
    numel = min(max(model.unit_numels), BUCKET_ELEMENTS)
    if model.largest_flat_numels:
        numel = model.largest_flat_numels[stage]
    flying = _LEAST_IN_FLIGHT * numel
    if stage >= 2:
        flying = max(flying, max(model.unit_numels) + numel)
    bucket = model.wire_bytes * min(flying, math.ceil(model.numel / numel) * numel)
    if stage >= 2:
        return bucket, bucket * ranks  # some transports receive from all, others from all others
    packed = bucket if model.wire_bytes < _SUMS_BYTES else 0.0  # else sums are sent as they are
    return (packed, bucket * ranks) if stage == 1 else (packed + bucket, 0.0)


def reductions_in_flight(model: ModelProfile, stage: int) -> int:
    """Reductions under way at a time: one while the one before it is added up.

    Where no rank keeps sums of its own, those of a whole unit, under the backward of the next.
    """
    if stage < 2:
        return _LEAST_IN_FLIGHT
    return max(_LEAST_IN_FLIGHT, 1 + math.ceil(max(model.unit_numels) / BUCKET_ELEMENTS))
