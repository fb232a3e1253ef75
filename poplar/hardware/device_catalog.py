"""Estimated `DeviceProfile`s of devices that were not measured.

A device with a published curve of the model uses that curve, scaled to the level of the roofline
because its precision is unknown. Other devices use the `roofline`. Both are estimates, so a profile
exists for several `Outlook`s, and results are reported as intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.hardware.published_curves import Curve, curve
from poplar.profile import BatchPoint, DeviceProfile

SPREAD = 0.3
"""Assumed relative error of activation memory, links, and the speed of a calibrated chip."""
UNCALIBRATED_SPREAD = 0.5
"""Assumed relative error of the speed of other chips."""
MEASURED_SPREAD = 0.1
"""Assumed relative error of the ratio of two devices that both have a published curve."""
HELD_BYTES = 1 << 30
"""CUDA context, kernels and NCCL's buffers; assumed."""
_UPDATE_LATENCY_SECONDS = 1e-3
"""Launches of an optimizer step; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """How reality may differ from the estimate, in multiples of the spread; 0: as estimated."""

    name: str
    speed: float = 0.0
    """Above 0: passes and optimizer are faster."""
    activations: float = 0.0
    """Above 0: a pass needs more activation memory."""
    links: float = 0.0
    """Above 0: links are faster."""


MIDDLE = Outlook(name="middle")
OPTIMISTIC = Outlook(name="optimistic", speed=1, activations=-1, links=1)
PESSIMISTIC = Outlook(name="pessimistic", speed=-1, activations=1, links=-1)


def spread(of: Specification) -> float:
    """Assumed relative error of the roofline for this device."""
    return SPREAD if of.gpu in roofline.CALIBRATED else UNCALIBRATED_SPREAD


def measured_curve(of: Specification, job: TrainingJob) -> Curve | None:
    """The published curve of this device with this job, if there is one."""
    shape = job.architecture
    if job.checkpointing or not job.fused_attention or job.sequence != shape.sequence:
        return None
    return curve(shape.name, of.gpu)


def device_profile(
    of: Specification,
    job: TrainingJob,
    outlook: Outlook = MIDDLE,
    *,
    memory_gib: float | None = None,
    host: str = "",
) -> DeviceProfile:
    """The estimated profile of a device.

    Args:
        of: the device.
        job: the model, and how it is trained.
        outlook: how reality differs from the estimate.
        memory_gib: memory of the device; None: as specified.
        host: name of its host.

    Returns:
        A profile up to the largest micro-batch that fits under the best outlook, so that all
        outlooks have the same batches; a published curve ends at its last point.
    """
    memory_bytes = int((memory_gib or of.memory_gib) * 2**30)
    activations = job.activation_bytes_per_sample
    memory_factor = 1 + SPREAD * outlook.activations
    speed = 1 + spread(of) * outlook.speed
    largest = max(1, int(memory_bytes / ((1 - SPREAD) * activations)))
    measured = measured_curve(of, job)
    if measured is None:
        seconds = {b: roofline.pass_seconds(of, job, b) for b in _batches(largest)}
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
                activation_bytes=math.ceil(memory_factor * activations * batch),
            )
            for batch, value in seconds.items()
        ),
        optimizer_seconds=roofline.optimizer_seconds(of, job) / speed,
        optimizer_latency_seconds=_UPDATE_LATENCY_SECONDS / speed,
        held_bytes=HELD_BYTES,
        peak_flops=of.half_flops,
        host=host,
    )


def _batches(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest: the roofline is linear, so a few points are enough."""
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*powers, largest]
