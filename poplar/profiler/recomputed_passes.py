"""Passes in which all units are recomputed in the backward: time and memory against the batch.

Measured after the plain curve, and only where memory may limit a plan. Few sizes are timed: what
recomputation takes is nearly in proportion to the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from poplar.profiler.batch_curves import TIMES_EACH, smoothed, tried_sizes
from poplar.profiler.batch_sizes import SizeLimits, climb, probe, time_sizes
from poplar.profiler.engine_passes import sharded_passes
from poplar.profiler.memory_budget import MemoryBudget
from poplar.profiler.passes import Passes
from poplar.profiler.progress import Report
from poplar.profiler.session import Session
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile
from poplar.zero.recomputation import Recomputation
from poplar.zero.unit import blocks_of

TIMING = 0.1
"""Part of the time budget for timing these passes."""
_STATE_BYTES = 24.0
"""Per element: more than parameters, gradients, optimizer state and buckets take at any stage."""


def with_recomputed_curves(
    session: Session, profile: ClusterProfile, report: Report
) -> ClusterProfile:
    """The profile with `recomputed_points` of all ranks. Collective.

    Unchanged if the model has no repeated units, or if every rank can hold the whole model beside
    the largest batch that may be planned.
    """
    most = max(session.exchange(SizeLimits.of(session, sharded=False).max_batch))
    limited = (_may_lack_memory(device, profile.model, most) for device in profile.devices)
    if not profile.model.recomputable_units or not any(limited):
        return profile
    report("passes that recompute activations")
    blocks, device = session.setup.unit_names, profile.devices[session.group.rank]
    with _recomputing_passes(session, blocks) as passes:
        curves = _measured(session, passes, device)
    last = profile.model.unit_names[profile.model.recomputable_units[-1]]
    others = [block for block in blocks if block not in blocks_of(last, blocks)]
    with _recomputing_passes(session, others) as passes:
        saved = _saved_without_last(session, passes, device, curves[session.group.rank])
    pairs = zip(profile.devices, curves, strict=True)
    devices = tuple(replace(device, recomputed_points=tuple(curve)) for device, curve in pairs)
    model = replace(profile.model, saved_without_last_unit=saved)
    return replace(profile, devices=devices, model=model)


def _may_lack_memory(device: DeviceProfile, model: ModelProfile, most: int) -> bool:
    """Whether the device cannot hold the whole model beside a batch of `most`."""
    state = _STATE_BYTES * model.numel + sum(model.unit_frozen_bytes) + model.frozen_bytes
    room = MemoryBudget(device.memory_bytes, device.held_bytes).activation_bytes - state
    largest = device.max_batch
    return device.activation_bytes(largest) * max(1.0, most / largest) > room


@contextmanager
def _recomputing_passes(session: Session, blocks: Sequence[str]) -> Iterator[Passes]:
    """Passes that recompute these blocks, on the engine if plain ones do not fit. Collective."""
    if not session.plain_passes_fit():
        with sharded_passes(session) as passes:
            passes.engine.recomputation.recompute(blocks)
            yield passes
        return
    recomputation = Recomputation(session.job.model, session.setup.unit_names, {})
    recomputation.recompute(blocks)
    try:
        with session.as_in_training():
            yield session.passes()
    finally:
        recomputation.remove()


def _measured(session: Session, passes: Passes, device: DeviceProfile) -> list[list[BatchPoint]]:
    """The points of every rank: the first, the largest, and one as large as without recomputation,
    if memory and time allow.
    """
    budget, own = session.job.profile_seconds, session.group.rank
    sharded = not session.plain_passes_fit()
    trying = (probe if sharded else climb)(passes, SizeLimits.of(session, sharded=sharded))
    by_rank = tried_sizes(session, passes, trying, "measuring memory with recomputation")
    chosen = session.exchange(_few(by_rank[own], device.max_batch))
    longest = max(sum(size.seconds for size in sizes) for sizes in chosen)
    seconds = min(TIMES_EACH * longest, budget * TIMING)

    def time_passes() -> list[BatchPoint]:
        return time_sizes(passes, chosen[own], seconds=seconds, least=2)

    return session.on_all_ranks(
        lambda: smoothed(passes.together(time_passes)), "timing passes with recomputation"
    )


def _saved_without_last(
    session: Session, passes: Passes, device: DeviceProfile, curve: Sequence[BatchPoint]
) -> float:
    """`ModelProfile.saved_without_last_unit`, with passes that recompute all other units: the
    least of all ranks.
    """
    known = [point for point in curve if point.batch <= device.max_batch][-1]
    plain = device.activation_bytes(known.batch)

    def measure() -> float:
        held = passes.together(lambda: passes.first(known.batch)).activation_bytes
        most = plain - known.activation_bytes
        return min(1.0, max(0.0, plain - held) / most) if most > 0.0 else 0.0

    return min(session.on_all_ranks(measure, "measuring memory with recomputation"))


def _few(sizes: Sequence[BatchPoint], plain: int) -> list[BatchPoint]:
    """The first size, the one nearest to the largest `plain` batch, and the last."""
    nearest = min(sizes, key=lambda size: abs(size.batch - plain))
    return list({size.batch: size for size in (sizes[0], nearest, sizes[-1])}.values())
