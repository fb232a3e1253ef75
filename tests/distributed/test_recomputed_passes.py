"""The profiler measures passes with recomputation where memory may limit a plan."""

from __future__ import annotations

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool

from poplar import profile_cluster
from poplar.planner.recomputed_curves import parts_of, with_recomputed_parts
from poplar.profiler import recomputed_passes
from poplar.profiler.passes import Passes
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile
from poplar.zero.preserved_state import gradients_dropped
from poplar.zero.recomputation import Recomputation

BLOCKS = [f"blocks.{block}" for block in range(4)]
BATCH = 8
MIB = 2**20


def profiled_and_real(memory_limit: int) -> tuple[ClusterProfile, list[int], int]:
    """The profile, the real peaks of passes with 0, 1, ... recomputed units, and their size."""
    model = models.build(ModelSpec(blocks=4, width=64, hidden=256)).to(harness.device())
    example = {k: v.to(harness.device()) for k, v in models.data(3, seed=0).items()}
    profile = profile_cluster(
        model,
        models.mean_over_samples,
        example,
        process_group=harness.group(),
        max_batch=BATCH,
        memory_limit=memory_limit,
        units=BLOCKS,
        compute_dtype=torch.float32,
        stages=(0,),
        seconds=2.0,
        cache=False,
        progress=False,
    )
    assert not any("forward" in vars(block) for block in model.blocks)
    (device,) = profile.devices
    batch = min(device.max_batch, device.recomputed_points[-1].batch)  # time may limit both
    passes = Passes(model, models.mean_over_samples, example, harness.device())
    peaks = []
    for count in range(len(BLOCKS) + 1):
        recomputation = Recomputation(model, BLOCKS, {})
        recomputation.recompute(BLOCKS[:count])
        with gradients_dropped(model):
            peaks.append(passes.first(batch).activation_bytes)
        recomputation.remove()
    return profile, peaks, batch


def test_predicted_peaks_are_never_below_real_ones_and_close(ranks: Pool) -> None:
    if ranks.backend == "nccl":
        pytest.skip("the allocator of a GPU rounds more than such a small model takes")
    ((profile, peaks, batch),) = ranks.run(profiled_and_real, 4 * MIB, ranks=1)
    names = profile.model.unit_names
    units = [names.index(block) for block in BLOCKS]
    assert profile.devices[0].recomputed_points[0].batch == 1
    for count, real in enumerate(peaks):
        changed = with_recomputed_parts(profile, [parts_of(profile.model, units[:count])])
        predicted = changed.devices[0].activation_bytes(batch)
        assert real <= predicted <= 1.05 * real, (count, real, predicted)


def test_only_models_that_memory_may_limit_are_measured() -> None:
    point = BatchPoint(batch=8, seconds=2.0, activation_bytes=8 * MIB)
    model = ModelProfile(unit_numels=(MIB,))

    def may_lack(memory: int, most: int) -> bool:
        device = DeviceProfile(
            name="", memory_bytes=memory * MIB, points=(point,), optimizer_seconds=0.0
        )
        return recomputed_passes._may_lack_memory(device, model, most)

    assert may_lack(memory=30, most=8)
    assert not may_lack(memory=60, most=8)
    assert may_lack(memory=60, most=128)  # time ended the search for the largest batch
