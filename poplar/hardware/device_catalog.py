"""Devices by name, and what is known of how fast each trains: `DeviceProfile`s nobody measured.

A device that somebody measured with the very model is given that curve (see `measurements`), scaled
so that its ratios to other devices are the measured ones and its level is the roofline's: the
curves' precision is not known. Every other device is given the `roofline`. Neither is a
measurement of the device that will be rented: so a profile comes in three `Outlook`s, and what is
planned on the middle one is told as an interval.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from poplar.hardware import roofline
from poplar.hardware.gpu_specifications import SPECIFICATIONS, Specification, specification
from poplar.hardware.model_shapes import TrainingJob
from poplar.hardware.published_measurements import Curve, curve
from poplar.profile import BatchPoint, DeviceProfile

SPREAD = 0.3
"""What is calculated rather than measured may be off by this part, either way: activation memory,
links, and the speed of a chip that the roofline was calibrated on."""
UNCALIBRATED_SPREAD = 0.5
"""The same, of the speed of any other chip."""
MEASURED_SPREAD = 0.1
"""The same, of one device beside another, where both have a measured curve of the model."""
HELD_BYTES = 1 << 30
"""CUDA context, kernels and NCCL's buffers; assumed."""
_UPDATE_LATENCY_SECONDS = 1e-3
"""Launches of an optimizer step; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """How reality may differ from what was calculated, in spreads: 0 is as expected."""

    name: str
    speed: float = 0.0
    """Above 0: passes and optimizer are faster."""
    activations: float = 0.0
    """Above 0: a pass keeps more."""
    links: float = 0.0
    """Above 0: links are faster."""


MIDDLE = Outlook(name="middle")
OPTIMISTIC = Outlook(name="optimistic", speed=1, activations=-1, links=1)
PESSIMISTIC = Outlook(name="pessimistic", speed=-1, activations=1, links=-1)


def spread(of: Specification) -> float:
    """By which part the speed of this device may differ from the roofline, either way."""
    return SPREAD if of.gpu in roofline.CALIBRATED else UNCALIBRATED_SPREAD


def find_device(name: str) -> Specification:
    """The device that is meant: as the table calls it, as a driver does, or in between.

    `A100-SXM-80`, `NVIDIA A100-SXM4-80GB` and `a800-80gb` are all found; `A100-40` is not, because
    two kinds are called so.

    Raises:
        ValueError: no such device, or several; lists those it can be.
    """
    for known in SPECIFICATIONS:
        if known.gpu.lower() == name.strip().lower():
            return known
    by_driver = specification(name)
    if by_driver is not None:
        return by_driver
    words = _words(name)
    fitting = [
        known
        for known in SPECIFICATIONS
        if words and words <= _words(known.gpu) | {str(known.memory_gib)}
    ]
    if len(fitting) == 1:
        return fitting[0]
    choice = [one.gpu for one in fitting or SPECIFICATIONS]
    problem = "may be several devices" if fitting else "is no device in the catalogue"
    raise ValueError(f"{name!r} {problem}; write one of {', '.join(choice)}")


def measured_curve(of: Specification, job: TrainingJob) -> Curve | None:
    """The curve of this device with this very job, if anybody measured it."""
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
    """What a device is expected to do, as if it had been measured.

    Args:
        of: the device.
        job: the model, and how it is trained.
        outlook: how reality differs from what was calculated.
        memory_gib: what there is of memory; None: what is printed.
        host: where it is.

    Returns:
        A profile up to the largest micro-batch that could fit under the best outlook, so that all
        outlooks know the same batches; measured devices end where their curve does.
    """
    memory_bytes = int((memory_gib or of.memory_gib) * 2**30)
    activations = job.activation_bytes_per_sample
    kept = 1 + SPREAD * outlook.activations
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
                activation_bytes=math.ceil(kept * activations * batch),
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
    """1, 2, 4, ... and the largest: the roofline is a straight line, so few points say it all."""
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*powers, largest]


def _words(name: str) -> set[str]:
    """A100-80GB is {a100, 80}."""
    parts = re.split(r"[^a-z0-9.]+", name.lower())
    return {re.sub(r"(?<=\d)(gb|gib)$", "", part) for part in parts} - {"", "nvidia", "geforce"}
