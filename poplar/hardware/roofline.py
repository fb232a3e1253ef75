"""How long a pass takes on a device nobody measured: what is computed, and what is moved.

    seconds(b) = 0.1 ms * layers + 6 bytes * parameters / bandwidth
               + b * (FLOPs / (efficiency * peak) + 5.2 * bytes produced / bandwidth)

A transformer alternates between matrix products, bound by the peak, and everything else, bound by
memory, and neither runs under the other: so the two bounds add up. Matrix products reach a part of
the peak that hangs on the kind of chip; everything else reads and writes what the forward produces
for the backward, five times over. What does not grow with the batch, launches and one pass over the
weights and their gradients, makes small batches less efficient.

Calibrated on `measurements`; `errors` says row by row how well it fits, and
`tests/unit/test_device_catalog.py` holds it to this:

- traffic and the A100's efficiency, on 8 training runs of 125M to 7B parameters: within 4 %;
- the H100's on 3 runs, within 15 %: they contradict each other by as much;
- the V100's on its speed beside an A100, one curve of one model, within 2 %. The T4 (Turing) and
  the L4, which have 70 W for what others do with 300 W, are given the same: nobody measured;
- the RTX 3090's likewise, but no efficiency below 1 meets its curve: beside an A100 it comes out
  17 % slower than measured. The RTX 4090 is given the same;
- launches on where the curves meet the axis, to a factor of two;
- all others are given the A100's.

Rows that were fitted say little of devices that were not. With the A100's efficiency, as a chip
nobody measured is given, the V100 would have come out 47 % too fast and the RTX 3090 39 % too slow:
that is how wrong the others may be (`CALIBRATED` has the chips they are not), and `catalogue` gives
intervals.

Nor do they say much of other software. Held out were six figures of BERT-large that NVIDIA
published with the TensorFlow of 2020 (`held_out_errors`): the roofline, which was fitted to stacks
with fused attention, is 2 % too slow to 33 % too fast on V100s, and 56 % and 89 % too fast on the
A100, which those stacks used badly. There an A100 was 2.1 to 2.3 times a V100, here it is 3.4
times: whatever hangs on such a ratio should be measured before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from poplar.hardware.gpu_specifications import SPECIFICATIONS, Specification
from poplar.hardware.model_shapes import HALF_BYTES, TrainingJob, architecture
from poplar.hardware.published_measurements import CURVES, HELD_OUT, THROUGHPUTS, Throughput, curve

LAYER_SECONDS = 1e-4
"""Launches of one layer's forward and backward."""
TRAFFIC = 5.2
"""How often what the forward produces is read or written."""
EFFICIENCY = 0.67
"""Part of the peak that matrix products reach, on an A100 and where nothing better is known."""
_EFFICIENCIES = {
    "H100-SXM-80": 0.42,
    "H100-PCIe-80": 0.42,
    "H200-SXM-141": 0.42,
    "V100-SXM2-16": 0.41,
    "V100-SXM2-32": 0.41,
    "V100-PCIe-16": 0.41,
    "V100S-PCIe-32": 0.41,
    "T4": 0.41,
    "L4": 0.41,
    "RTX-3090": 0.95,
    "RTX-4090": 0.95,
}
CALIBRATED = frozenset(
    {
        *("A100-PCIe-40", "A100-SXM-40", "A100-SXM-80", "A800-80"),
        *("H100-PCIe-80", "H100-SXM-80", "H200-SXM-141"),
        *("V100-SXM2-16", "V100-SXM2-32", "V100-PCIe-16", "V100S-PCIe-32", "RTX-3090"),
    }
)
"""Devices with a chip that somebody measured."""
_UPDATE_BYTES = 30
"""AdamW of one element: fp32 master and two moments read and written, a gradient read, 16 bit
written."""
_REFERENCE = "A100-SXM-40"
"""Curves say how fast others are beside this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationError:
    """One published measurement beside what the roofline says of it."""

    what: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative; above 0: the roofline is too fast."""
        return self.modelled / self.measured - 1.0


def device(gpu: str) -> Specification:
    """The specification with exactly this name."""
    return next(known for known in SPECIFICATIONS if known.gpu == gpu)


def efficiency(gpu: str) -> float:
    """Part of its peak that matrix products reach."""
    return _EFFICIENCIES.get(gpu, EFFICIENCY)


def pass_seconds(of: Specification, job: TrainingJob, batch: int) -> float:
    """One forward and backward of `batch` samples."""
    bandwidth = of.memory_gb_per_s * 1e9
    numel, layers = job.architecture.numel, job.architecture.layers
    fixed = LAYER_SECONDS * layers + 3 * HALF_BYTES * numel / bandwidth
    computed = job.flops_per_sample / (efficiency(of.gpu) * of.half_flops)
    moved = TRAFFIC * job.produced_bytes_per_sample / bandwidth
    return job.recomputation * (fixed + batch * (computed + moved))


def optimizer_seconds(of: Specification, job: TrainingJob) -> float:
    """AdamW over the whole model: bound by memory."""
    return _UPDATE_BYTES * job.architecture.numel / (of.memory_gb_per_s * 1e9)


def curve_scale(model: str) -> float:
    """What this model's curves are multiplied by, on all devices alike.

    They then say what the roofline says of the reference device, so that a measured device and one
    that was not can stand side by side.
    """
    measured = curve(model, _REFERENCE)
    if measured is None:
        return 1.0
    batch = max(measured.seconds)
    job = TrainingJob(architecture=architecture(model))
    return pass_seconds(device(_REFERENCE), job, batch) / measured.seconds[batch]


def errors() -> Iterator[CalibrationError]:
    """Every measurement that the roofline was calibrated on, beside what it says.

    Of throughputs the samples per second; of curves the speed beside the reference device, at the
    largest batch that both ran.
    """
    yield from map(_error, THROUGHPUTS)
    for other in CURVES:
        reference = curve(other.model, _REFERENCE)
        if reference is None or other is reference:
            continue
        batch = max(set(other.seconds) & set(reference.seconds))
        job = TrainingJob(architecture=architecture(other.model))
        yield CalibrationError(
            what=f"{other.model} on {other.gpu} over {_REFERENCE}: {other.source}",
            measured=reference.seconds[batch] / other.seconds[batch],
            modelled=pass_seconds(device(_REFERENCE), job, batch)
            / pass_seconds(device(other.gpu), job, batch),
        )


def held_out_errors() -> Iterator[CalibrationError]:
    """The same of measurements that nothing was fitted to."""
    yield from map(_error, HELD_OUT)


def _error(run: Throughput) -> CalibrationError:
    job = TrainingJob(architecture=architecture(run.model), sequence=run.sequence)
    printed = device(run.gpu)
    if run.mfu is not None:
        measured = run.mfu * printed.half_flops / job.flops_per_sample
    else:
        assert run.tokens_per_second is not None
        measured = run.tokens_per_second / run.sequence
    return CalibrationError(
        what=f"{run.model} ({run.sequence} tokens) on {run.gpu}: {run.source}",
        measured=measured,
        modelled=run.micro_batch / pass_seconds(printed, job, run.micro_batch),
    )
