"""What others measured on real devices and published: what the roofline is calibrated on.

Curves are seconds of a pass of a whole model against the micro-batch, on one device, without tensor
parallelism, from the profiles that eth-easl/sailor publishes (MIT licence, Copyright ETH Zurich;
"Sailor", SOSP 2025). Neither precision nor sequence length is stated there, so their ratios count,
not their times: `catalogue` scales them. Throughputs are of training runs on devices of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

SAILOR = "eth-easl/sailor (MIT), one forward and one backward pass"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Passes of one model on one device."""

    model: str
    """As `architecture` knows it."""
    gpu: str
    """As `specifications` knows it. The source says A100-40, A100-80 and V100-16: taken for the
    SXM variants, which the clouds that it used rent out."""
    passes: tuple[tuple[int, float, float], ...]
    """Micro-batch, seconds of the forward, seconds of the backward."""
    source: str = SAILOR

    @property
    def seconds(self) -> dict[int, float]:
        """A whole pass by micro-batch."""
        return {batch: forward + backward for batch, forward, backward in self.passes}


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """A training run: what one of its devices achieved."""

    model: str
    gpu: str
    micro_batch: int
    """8 where the source does not say."""
    sequence: int
    source: str
    mfu: float | None = None
    """Model FLOPs over peak FLOPs."""
    tokens_per_second: float | None = None
    """Of one device."""


CURVES = (
    Curve(
        model="gpt-neo-2.7b",
        gpu="A100-SXM-40",
        passes=(
            (1, 0.159188, 0.375756),
            (2, 0.304919, 0.730067),
            (4, 0.617984, 1.465424),
            (8, 1.264355, 2.978234),
        ),
    ),
    Curve(
        model="gpt-neo-2.7b",
        gpu="A100-SXM-80",
        passes=(
            (1, 0.1672, 0.359),
            (2, 0.2955, 0.6885),
            (4, 0.5745, 1.3896),
            (8, 1.139, 2.9162),
            (16, 2.4121, 5.8868),
            (32, 5.0992, 11.8791),
        ),
    ),
    Curve(
        model="opt-350m",
        gpu="A100-SXM-40",
        passes=(
            (1, 0.060916, 0.145805),
            (2, 0.109052, 0.286689),
            (4, 0.213916, 0.56003),
            (8, 0.422269, 1.108783),
        ),
    ),
    Curve(
        model="opt-350m",
        gpu="A100-SXM-80",
        passes=(
            (1, 0.0692, 0.1314),
            (2, 0.1089, 0.2527),
            (4, 0.2007, 0.4982),
            (8, 0.3722, 1.0071),
            (16, 0.7074, 2.028),
            (32, 1.4496, 4.0265),
        ),
    ),
    Curve(
        model="opt-350m",
        gpu="RTX-3090",
        passes=(
            (1, 0.115821, 0.300959),
            (2, 0.232694, 0.591741),
            (4, 0.447826, 1.195192),
            (8, 0.931316, 2.48063),
        ),
    ),
    Curve(
        model="opt-350m",
        gpu="V100-SXM2-16",
        passes=(
            (1, 0.195256, 0.442809),
            (2, 0.375833, 0.874167),
            (4, 0.767907, 1.841836),
        ),
    ),
)
"""Without the source's GH-96 (a Grace Hopper), of which `specifications` has no figures."""

_FOUNDRY = "llm-foundry's table of training throughput"
THROUGHPUTS = (
    Throughput(
        model="mpt-125m",
        gpu="A100-SXM-80",
        micro_batch=8,
        sequence=2048,
        mfu=0.448,
        source=_FOUNDRY,
    ),
    Throughput(
        model="mpt-760m",
        gpu="A100-SXM-80",
        micro_batch=8,
        sequence=2048,
        mfu=0.569,
        source=_FOUNDRY,
    ),
    Throughput(
        model="mpt-1b", gpu="A100-SXM-80", micro_batch=14, sequence=2048, mfu=0.599, source=_FOUNDRY
    ),
    Throughput(
        model="mpt-7b", gpu="A100-SXM-80", micro_batch=8, sequence=2048, mfu=0.642, source=_FOUNDRY
    ),
    Throughput(
        model="mpt-125m",
        gpu="A100-SXM-40",
        micro_batch=8,
        sequence=2048,
        mfu=0.428,
        source=_FOUNDRY,
    ),
    Throughput(
        model="mpt-760m",
        gpu="A100-SXM-40",
        micro_batch=8,
        sequence=2048,
        mfu=0.529,
        source=_FOUNDRY,
    ),
    Throughput(
        model="mpt-1b", gpu="A100-SXM-40", micro_batch=8, sequence=2048, mfu=0.562, source=_FOUNDRY
    ),
    Throughput(
        model="mpt-1b", gpu="H100-SXM-80", micro_batch=8, sequence=2048, mfu=0.418, source=_FOUNDRY
    ),
    Throughput(
        model="llama-1.1b",
        gpu="A100-SXM-40",
        micro_batch=8,
        sequence=2048,
        tokens_per_second=24000,
        source="TinyLlama, 16 devices, 2 million tokens a batch",
    ),
    Throughput(
        model="llama-3-8b",
        gpu="H100-SXM-80",
        micro_batch=1,
        sequence=8192,
        tokens_per_second=5762,
        source="torchtitan, 8 devices, FSDP, no compile",
    ),
    Throughput(
        model="llama-3-8b",
        gpu="H100-SXM-80",
        micro_batch=1,
        sequence=8192,
        tokens_per_second=6667,
        source="torchtitan, 8 devices, FSDP, compile",
    ),
)
"""With their communication, on NVLink: a little below what one device does alone."""


def _bert(gpu: str, sequence: int, micro_batch: int, samples_per_second: float) -> Throughput:
    return Throughput(
        model="bert-large",
        gpu=gpu,
        micro_batch=micro_batch,
        sequence=sequence,
        tokens_per_second=samples_per_second * sequence,
        source="NVIDIA DeepLearningExamples, TensorFlow 20.06, pre-training, one device",
    )


HELD_OUT = (
    _bert("V100-SXM2-16", 512, 4, 28.72),
    _bert("V100-SXM2-16", 128, 16, 134.34),
    _bert("V100-SXM2-32", 512, 8, 31.23),
    _bert("V100-SXM2-32", 128, 64, 168.63),
    _bert("A100-SXM-40", 512, 16, 70.856),
    _bert("A100-SXM-40", 128, 64, 356.845),
)
"""Nothing was fitted to these. Software of 2020: dropout, and attention that writes its scores."""


def curve(model: str, gpu: str) -> Curve | None:
    """What was measured of this model on this device, if anything."""
    return next((known for known in CURVES if (known.model, known.gpu) == (model, gpu)), None)
