"""Estimated `DeviceProfile`s of devices that were not measured.

A device with a published curve of the model uses that curve, scaled to the level of the roofline
because its precision is unknown. Other devices use the `roofline`.
"""

from __future__ import annotations

import math

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.hardware.published_curves import Curve, curve
from poplar.profile import BatchPoint, DeviceProfile

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


def measured_curve(of: Specification, job: TrainingJob) -> Curve | None:
    """The published curve of this device with this job, if there is one."""
    shape = job.architecture
    is_published_job = job.sequence == shape.sequence and not job.checkpointing
    return curve(shape.name, of.gpu) if is_published_job else None


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
        assumed to be possible, whatever the factors; a published curve ends at its last point.
    """
    memory_bytes = int((memory_gib or of.memory_gib) * 2**30)
    per_sample = job.activation_bytes_per_sample
    measured = measured_curve(of, job)
    if measured is None:
        largest = max(1, int(memory_bytes / ((1 - SPREAD) * per_sample)))
        # The roofline is linear, so a few points are enough.
        powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
        seconds = {b: roofline.pass_seconds(of, job, b) for b in (*powers, largest)}
    else:
        scale = roofline.curve_scale(job.architecture.name)
        seconds = {batch: scale * value for batch, value in measured.seconds.items()}
    return DeviceProfile(
        name=of.gpu,
        memory_bytes=memory_bytes,
        points=tuple(
            BatchPoint(
                batch=batch,
                seconds=value / speed,
                activation_bytes=math.ceil(activations * per_sample * batch),
            )
            for batch, value in seconds.items()
        ),
        optimizer_seconds=roofline.optimizer_seconds(of, job) / speed,
        optimizer_latency_seconds=_UPDATE_LATENCY_SECONDS / speed,
        held_bytes=HELD_BYTES,
        peak_flops=of.half_flops,
        host=host,
    )
