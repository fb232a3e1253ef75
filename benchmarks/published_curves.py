"""Published pass times of real devices, to which `poplar.hardware.roofline` was calibrated.

Curves are seconds of a pass of a whole model against the micro-batch, on one device, from the
profiles that eth-easl/sailor publishes (MIT licence, Copyright ETH Zurich; "Sailor", SOSP 2025).
They state neither precision nor sequence length, so only their ratios are used.
"""

from __future__ import annotations

from typing import NamedTuple

REFERENCE = "A100-SXM-40"
"""Curves are compared with this device; every model with a curve has one of it."""
SOURCE = "eth-easl/sailor (MIT), one forward and one backward pass"


class Curve(NamedTuple):
    """Passes of one model on one device."""

    model: str
    """A name of `model_shapes.ARCHITECTURES`."""
    gpu: str
    """A name of `gpu_specifications`. The source says A100-40, A100-80 and V100-16; we assume the
    SXM variants that the clouds it used rent out."""
    passes: tuple[tuple[int, float, float], ...]
    """Micro-batch, seconds of the forward, seconds of the backward."""

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a pass by micro-batch."""
        return {batch: forward + backward for batch, forward, backward in self.passes}


# fmt: off
CURVES = (
    Curve("gpt-neo-2.7b", "A100-SXM-40", (
        (1, 0.159188, 0.375756), (2, 0.304919, 0.730067), (4, 0.617984, 1.465424),
        (8, 1.264355, 2.978234),
    )),
    Curve("gpt-neo-2.7b", "A100-SXM-80", (
        (1, 0.1672, 0.359), (2, 0.2955, 0.6885), (4, 0.5745, 1.3896), (8, 1.139, 2.9162),
        (16, 2.4121, 5.8868), (32, 5.0992, 11.8791),
    )),
    Curve("opt-350m", "A100-SXM-40", (
        (1, 0.060916, 0.145805), (2, 0.109052, 0.286689), (4, 0.213916, 0.56003),
        (8, 0.422269, 1.108783),
    )),
    Curve("opt-350m", "A100-SXM-80", (
        (1, 0.0692, 0.1314), (2, 0.1089, 0.2527), (4, 0.2007, 0.4982), (8, 0.3722, 1.0071),
        (16, 0.7074, 2.028), (32, 1.4496, 4.0265),
    )),
    Curve("opt-350m", "RTX-3090", (
        (1, 0.115821, 0.300959), (2, 0.232694, 0.591741), (4, 0.447826, 1.195192),
        (8, 0.931316, 2.48063),
    )),
    Curve("opt-350m", "V100-SXM2-16", (
        (1, 0.195256, 0.442809), (2, 0.375833, 0.874167), (4, 0.767907, 1.841836),
    )),
)
"""Without the source's GH-96 (Grace Hopper), which `gpu_specifications` does not have."""
# fmt: on
