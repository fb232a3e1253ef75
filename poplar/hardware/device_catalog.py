"""Estimated `DeviceProfile`s of devices that were not measured.

The `roofline` estimates their speed. `SimulatedCluster` has profiles for its assumed errors.
"""

from __future__ import annotations

import math

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.values.profile import BatchPoint, DeviceProfile

SPREAD = 0.3
"""Assumed relative error of activation memory, links, and the speed of a calibrated chip."""
UNCALIBRATED_SPREAD = 0.5
"""Assumed relative error of the speed of other chips."""
HELD_BYTES = 1 << 30
"""CUDA context, kernels and NCCL's buffers; assumed."""
_UPDATE_LATENCY_SECONDS = 1e-3
"""Launches of an optimizer step; assumed."""


def spread(of: Specification) -> float:
    """Assumed relative error of the roofline for this device."""
    return SPREAD if of.gpu.startswith(roofline.CALIBRATED) else UNCALIBRATED_SPREAD


def device_profile(
    of: Specification,
    job: TrainingJob,
    *,
    speed: float = 1.0,
    activations: float = 1.0,
    memory_gib: float | None = None,
    host: str = "",
) -> DeviceProfile:
    """The estimated profile of a device.

    Args:
        of: the device.
        job: the model, and how it is trained.
        speed: factor of the estimated speed of passes and optimizer.
        activations: factor of the estimated activation memory.
        memory_gib: memory of the device; None: as specified.
        host: name of its host.

    Returns:
        A profile up to the largest micro-batch that fits with the least activation memory that is
        assumed to be possible, whatever the factors.
    """
    memory_bytes = int((memory_gib or of.memory_gib) * 2**30)
    per_sample = job.activation_bytes_per_sample
    largest = max(1, int(memory_bytes / ((1 - SPREAD) * per_sample)))
    # The roofline is linear, so a few points are enough.
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return DeviceProfile(
        name=of.gpu,
        memory_bytes=memory_bytes,
        points=tuple(
            BatchPoint(
                batch=batch,
                seconds=roofline.pass_seconds(of, job, batch) / speed,
                activation_bytes=math.ceil(activations * per_sample * batch),
            )
            for batch in (*powers, largest)
        ),
        optimizer_seconds=roofline.optimizer_seconds(of, job) / speed,
        optimizer_latency_seconds=_UPDATE_LATENCY_SECONDS / speed,
        held_bytes=HELD_BYTES,
        peak_flops=of.half_flops,
        host=host,
    )
