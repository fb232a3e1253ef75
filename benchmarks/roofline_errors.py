"""The errors of `poplar.hardware.roofline` on published measurements.

    python benchmarks/roofline_errors.py

Throughputs are of training runs on devices of one type. The roofline was calibrated on all but
`HELD_OUT`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from published_curves import CURVES, REFERENCE, SOURCE

from poplar.hardware.gpu_specifications import find_device
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.roofline import pass_seconds


class Throughput(NamedTuple):
    """One device's throughput in a training run."""

    model: str
    gpu: str
    micro_batch: int
    """8 where the source does not say."""
    sequence: int
    source: str
    mfu: float | None = None
    """Model FLOPs over peak FLOPs."""
    tokens_per_second: float | None = None


# fmt: off
_FOUNDRY = "llm-foundry's table of training throughput"
THROUGHPUTS = (
    Throughput("mpt-125m", "A100-SXM-80", 8, 2048, _FOUNDRY, mfu=0.448),
    Throughput("mpt-760m", "A100-SXM-80", 8, 2048, _FOUNDRY, mfu=0.569),
    Throughput("mpt-1b", "A100-SXM-80", 14, 2048, _FOUNDRY, mfu=0.599),
    Throughput("mpt-7b", "A100-SXM-80", 8, 2048, _FOUNDRY, mfu=0.642),
    Throughput("mpt-125m", "A100-SXM-40", 8, 2048, _FOUNDRY, mfu=0.428),
    Throughput("mpt-760m", "A100-SXM-40", 8, 2048, _FOUNDRY, mfu=0.529),
    Throughput("mpt-1b", "A100-SXM-40", 8, 2048, _FOUNDRY, mfu=0.562),
    Throughput("mpt-1b", "H100-SXM-80", 8, 2048, _FOUNDRY, mfu=0.418),
    Throughput(
        "llama-1.1b", "A100-SXM-40", 8, 2048, "TinyLlama, 16 devices, 2 million tokens a batch",
        tokens_per_second=24000,
    ),
    Throughput(
        "llama-3-8b", "H100-SXM-80", 1, 8192, "torchtitan, 8 devices, FSDP, no compile",
        tokens_per_second=5762,
    ),
    Throughput(
        "llama-3-8b", "H100-SXM-80", 1, 8192, "torchtitan, 8 devices, FSDP, compile",
        tokens_per_second=6667,
    ),
)
"""With their communication, on NVLink: slightly below the throughput of one device alone."""
# fmt: on


def _bert(gpu: str, sequence: int, micro_batch: int, samples_per_second: float) -> Throughput:
    source = "NVIDIA DeepLearningExamples, TensorFlow 20.06, pre-training, one device"
    tokens = samples_per_second * sequence
    return Throughput("bert-large", gpu, micro_batch, sequence, source, tokens_per_second=tokens)


HELD_OUT = (
    _bert("V100-SXM2-16", 512, 4, 28.72),
    _bert("V100-SXM2-16", 128, 16, 134.34),
    _bert("V100-SXM2-32", 512, 8, 31.23),
    _bert("V100-SXM2-32", 128, 64, 168.63),
    _bert("A100-SXM-40", 512, 16, 70.856),
    _bert("A100-SXM-40", 128, 64, 356.845),
)
"""Not used for calibration. Software of 2020, with dropout and without fused attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationError:
    """A published measurement and the roofline's estimate of it."""

    what: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative error; above 0: the roofline is too fast."""
        return self.modelled / self.measured - 1.0


def errors() -> Iterator[CalibrationError]:
    """The errors of all measurements that the roofline was calibrated on.

    For throughputs: samples per second. For curves: the speed relative to the reference device, at
    the largest batch of both.
    """
    yield from map(_error, THROUGHPUTS)
    references = {curve.model: curve for curve in CURVES if curve.gpu == REFERENCE}
    for other in CURVES:
        reference = references[other.model]
        if other is reference:
            continue
        batch = max(set(other.seconds) & set(reference.seconds))
        job = TrainingJob(architecture=architecture(other.model))
        yield CalibrationError(
            what=f"{other.model} on {other.gpu} over {REFERENCE}: {SOURCE}",
            measured=reference.seconds[batch] / other.seconds[batch],
            modelled=pass_seconds(find_device(REFERENCE), job, batch)
            / pass_seconds(find_device(other.gpu), job, batch),
        )


def held_out_errors() -> Iterator[CalibrationError]:
    """The errors of measurements that were not used for calibration."""
    yield from map(_error, HELD_OUT)


def _error(run: Throughput) -> CalibrationError:
    job = TrainingJob(architecture=architecture(run.model), sequence=run.sequence)
    printed = find_device(run.gpu)
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


if __name__ == "__main__":
    for title, found in (("calibration", errors()), ("held out", held_out_errors())):
        print(f"{title} (above 0: the roofline is too fast)")
        for one in found:
            print(f"  {100 * one.error:+4.0f} %  {one.what}")
