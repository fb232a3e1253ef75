"""Estimated profiles of devices that were not measured: compute plus memory access.

    seconds(b) = 0.1 ms * layers + 6 bytes * parameters / bandwidth
               + b * (FLOPs / (efficiency * peak) + 5.2 * bytes produced / bandwidth)

Matrix products are bound by the peak, all other operations by memory, and their times add up.
Launches and one pass over weights and gradients do not grow with the batch. Calibrated on published
measurements, with these errors (`benchmarks/roofline_errors.py` prints them):

    A100, memory    8 training runs of 125M to 7B parameters, within 4 %
    H100            3 runs, within 15 %, as much as they contradict each other
    V100            a curve of one model relative to an A100, within 2 %
    RTX 3090        likewise; with the largest sensible efficiency 17 % slower than measured
    launches        where the curves meet the axis, to a factor of two
    not used        BERT-large with TensorFlow of 2020: from 2 % too slow to 33 % too fast on V100,
                    56 % and 89 % too fast on A100

T4 and L4 (70 W instead of 300 W) get the efficiency of V100, RTX 4090 that of RTX 3090, and all
others that of A100, with which V100 would be 47 % too fast and RTX 3090 39 % too slow.
"""

from __future__ import annotations

import math

from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import HALF_BYTES, TrainingJob
from poplar.values.profile import BatchPoint, DeviceProfile

LAYER_SECONDS = 1e-4
"""Launches of one layer's forward and backward."""
TRAFFIC = 5.2
"""How often each byte that the forward produces is read or written."""
DEFAULT_EFFICIENCY = 0.67
"""Fraction of the peak that matrix products reach on A100, and on chips without their own."""
EFFICIENCIES = {
    "H100": 0.42,
    "H200": 0.42,
    "V100": 0.41,
    "T4": 0.41,
    "L40S": DEFAULT_EFFICIENCY,
    "L4": 0.41,
    "RTX-3": 0.95,
    "RTX-4": 0.95,
    "RTX-5": 0.95,
}
"""Fractions by chip; the first one counts that a device's name begins with. The peaks of GeForce
cards are those with fp32 accumulation, which other cards have twice, so they are better used."""
CALIBRATED = ("A100", "A800", "H100", "H200", "V100", "RTX-3090")
"""Chips with a published measurement."""
_UPDATE_BYTES = 30
"""AdamW per element: master and moments read and written, gradient read, parameter written."""
SPREAD = 0.3
"""Assumed relative error of activation memory, links, and the speed of a calibrated chip."""
UNCALIBRATED_SPREAD = 0.5
"""Assumed relative error of the speed of other chips."""
HELD_BYTES = 1 << 30
"""CUDA context, kernels and NCCL's buffers; assumed."""
_UPDATE_LATENCY_SECONDS = 1e-3
"""Launches of an optimizer step; assumed."""


def pass_seconds(of: Specification, job: TrainingJob, batch: int) -> float:
    """One forward and backward of `batch` samples."""
    bandwidth = of.memory_gb_per_s * 1e9
    numel, layers = job.architecture.numel, job.architecture.layers
    efficiencies = (value for chip, value in EFFICIENCIES.items() if of.gpu.startswith(chip))
    flops = next(efficiencies, DEFAULT_EFFICIENCY) * of.half_flops
    fixed = LAYER_SECONDS * layers + 3 * HALF_BYTES * numel / bandwidth
    moved = TRAFFIC * job.produced_bytes_per_sample / bandwidth
    return job.recomputation * (fixed + batch * (job.flops_per_sample / flops + moved))


def optimizer_seconds(of: Specification, job: TrainingJob) -> float:
    """AdamW over the whole model: bound by memory."""
    return _UPDATE_BYTES * job.architecture.numel / (of.memory_gb_per_s * 1e9)


def spread(of: Specification) -> float:
    """Assumed relative error of the roofline for this device."""
    return SPREAD if of.gpu.startswith(CALIBRATED) else UNCALIBRATED_SPREAD


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
        speed: factor of the estimated speed of passes and optimizer.
        activations: factor of the estimated activation memory.
        memory_gib: memory of the device; None: as specified.

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
                seconds=pass_seconds(of, job, batch) / speed,
                activation_bytes=math.ceil(activations * per_sample * batch),
            )
            for batch in (*powers, largest)
        ),
        optimizer_seconds=optimizer_seconds(of, job) / speed,
        optimizer_latency_seconds=_UPDATE_LATENCY_SECONDS / speed,
        held_bytes=HELD_BYTES,
        peak_flops=of.half_flops,
        host=host,
    )
