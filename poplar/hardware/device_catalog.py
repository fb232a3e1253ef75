"""Estimated `DeviceProfile`s of devices that were not measured.

A device with a published curve of the model uses that curve, scaled to the level of the roofline
because its precision is unknown. Other devices use the `roofline`. `SimulatedCluster` has profiles
for the assumed errors of both.
"""

from __future__ import annotations

import math

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import Specification, find_device
from poplar.hardware.model_shapes import TrainingJob
from poplar.hardware.published_curves import CURVES
from poplar.values.profile import BatchPoint, DeviceProfile

SPREAD = 0.3
"""Assumed relative error of activation memory, links, and the speed of a calibrated chip."""
UNCALIBRATED_SPREAD = 0.5
"""Assumed relative error of the speed of other chips."""
REFERENCE = "A100-SXM-40"
"""Published curves are scaled relative to this device; every model with a curve has one of it."""
HELD_BYTES = 1 << 30
"""CUDA context, kernels and NCCL's buffers; assumed."""
_UPDATE_LATENCY_SECONDS = 1e-3
"""Launches of an optimizer step; assumed."""


def spread(of: Specification) -> float:
    """Assumed relative error of the roofline for this device."""
    return SPREAD if of.gpu.startswith(roofline.CALIBRATED) else UNCALIBRATED_SPREAD


def published_seconds(of: Specification, job: TrainingJob) -> dict[int, float] | None:
    """Seconds of a pass by micro-batch from a published curve; None: there is no curve.

    All curves of a model have the scale that makes the reference device equal to the roofline.
    """
    shape = job.architecture
    curves = {curve.gpu: curve.seconds for curve in CURVES if curve.model == shape.name}
    if of.gpu not in curves or job.checkpointing or job.sequence != shape.sequence:
        return None
    batch, measured = max(curves[REFERENCE].items())
    scale = roofline.pass_seconds(find_device(REFERENCE), job, batch) / measured
    return {batch: scale * seconds for batch, seconds in curves[of.gpu].items()}


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
    seconds = published_seconds(of, job)
    if seconds is None:
        largest = max(1, int(memory_bytes / ((1 - SPREAD) * per_sample)))
        # The roofline is linear, so a few points are enough.
        powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
        seconds = {b: roofline.pass_seconds(of, job, b) for b in (*powers, largest)}
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
