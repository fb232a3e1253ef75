"""Estimated pass times of devices that were not measured: compute plus memory access.

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

from poplar.hardware.gpu_specifications import Specification
from poplar.hardware.model_shapes import HALF_BYTES, TrainingJob

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
    "L4": 0.41,
    "RTX-3090": 0.95,
    "RTX-4090": 0.95,
}
"""By chip, with which the names of its devices begin."""
CALIBRATED = ("A100", "A800", "H100", "H200", "V100", "RTX-3090")
"""Chips with a published measurement."""
_UPDATE_BYTES = 30
"""AdamW per element: master and moments read and written, gradient read, parameter written."""


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
