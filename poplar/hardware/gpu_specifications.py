"""Vendor specifications of GPUs: peak FLOP/s, memory and bandwidth, by driver name.

Used by the `flops` policy, which plans by peak FLOP/s as Whale does, and for simulated devices.
Peaks are dense fp16 tensor-core TFLOP/s, or plain fp16 without tensor cores. `source` says where a
figure comes from; "recalled" marks figures that were not looked up.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

_LISTS = "public spec lists"
_RECALLED = "public spec lists; link recalled"


class Specification(NamedTuple):
    """One GPU model."""

    gpu: str
    driver_words: str
    """Words that the driver's device name contains, as "NVIDIA A100-SXM4-80GB" split at spaces and
    dashes."""
    memory_gib: int
    half_tflops: float
    """Dense fp16, and bf16 where `bf16`."""
    memory_gb_per_s: float
    bf16: bool
    """Whether the device supports bf16 natively."""
    link: str
    link_gb_per_s_one_way: float
    source: str

    @property
    def half_flops(self) -> float:
        """Peak of fp16, in FLOP/s."""
        return self.half_tflops * 1e12


# fmt: off
SPECIFICATIONS = (
    Specification("P100", "p100", 16, 21.2, 732, False, "PCIe3", 16, _RECALLED),
    Specification("V100-SXM2-16", "v100 sxm2 16gb", 16, 125, 900, False, "NVLink2", 150, _LISTS),
    Specification("V100-SXM2-32", "v100 sxm2 32gb", 32, 125, 900, False, "NVLink2", 150, _LISTS),
    Specification("V100-PCIe-16", "v100 pcie 16gb", 16, 112, 900, False, "PCIe3", 16, _RECALLED),
    Specification("V100S-PCIe-32", "v100s", 32, 130, 1134, False, "PCIe3", 16, _RECALLED),
    Specification("T4", "t4", 16, 65, 320, False, "PCIe3", 16, _RECALLED),
    Specification("A100-PCIe-40", "a100 pcie 40gb", 40, 312, 1555, True, "PCIe4", 32, _RECALLED),
    Specification("A100-SXM-40", "a100 sxm4 40gb", 40, 312, 1555, True, "NVLink3", 300, _LISTS),
    Specification("A100-SXM-80", "a100 sxm4 80gb", 80, 312, 2039, True, "NVLink3", 300, _LISTS),
    Specification("A800-80", "a800 80gb", 80, 312, 2039, True, "NVLink", 200, "recalled"),
    Specification("L4", "l4", 24, 121, 300, True, "PCIe4", 32, _RECALLED),
    Specification("A40", "a40", 48, 149.7, 696, True, "PCIe4", 32, _RECALLED),
    Specification("L40S", "l40s", 48, 362, 864, True, "PCIe4", 32, "recalled"),
    Specification("RTX-3060", "rtx 3060", 12, 25, 360, True, "PCIe4", 32, _RECALLED),
    Specification("RTX-3070", "rtx 3070", 8, 40, 448, True, "PCIe4", 32, _RECALLED),
    Specification("RTX-3080", "rtx 3080", 10, 60, 760, True, "PCIe4", 32, _RECALLED),
    Specification("RTX-3090", "rtx 3090", 24, 71, 936, True, "PCIe4", 32,
                  "recalled (fp32 accumulate); bandwidth from spec lists"),
    Specification("RTX-4090", "rtx 4090", 24, 165.2, 1008, True, "PCIe4", 32,
                  "public spec lists; no peer-to-peer (recalled)"),
    Specification("RTX-5060-Ti", "rtx 5060 ti", 16, 47.4, 448, True, "PCIe5", 32, "recalled"),
    Specification("RTX-5070-Ti", "rtx 5070 ti", 16, 87.9, 896, True, "PCIe5", 64, "recalled"),
    Specification("RTX-5090", "rtx 5090", 32, 209.5, 1792, True, "PCIe5", 64, "recalled"),
    Specification("RTX-A6000", "rtx a6000", 48, 154.8, 768, True, "PCIe4", 32, _RECALLED),
    Specification("H100-PCIe-80", "h100 pcie", 80, 756, 2000, True, "PCIe5", 64, _RECALLED),
    Specification("H100-SXM-80", "h100 80gb hbm3", 80, 989, 3350, True, "NVLink4", 450, _LISTS),
    Specification("H200-SXM-141", "h200", 141, 989, 4800, True, "NVLink4", 450, _LISTS),
)
# fmt: on

_VARIANTS = frozenset({"ti", "super", "laptop", "mobile", "max", "nvl", "mig", "d", "ada"})
"""Words of variants that have other figures than the device in the table."""


def specification(name: str) -> Specification | None:
    """The specification of a device by its driver name; None if the table does not have it.

    Variants that are not in the table (a laptop GPU, a MIG slice) give None.
    """
    words = _words(name)
    for known in SPECIFICATIONS:
        own = set(known.driver_words.split())
        if own <= words and not (words - own) & _VARIANTS:
            return known
    return None


@cache
def find_device(name: str) -> Specification:
    """The device with this name: a driver's name, or an unambiguous part of a name of the table.

    `A100-SXM-80`, `NVIDIA A100-SXM4-80GB` and `a800-80gb` are found; `A100-40` is ambiguous.

    Raises:
        ValueError: no such device, or several; the message lists the candidates.
    """
    by_driver = specification(name)
    if by_driver is not None:
        return by_driver
    words = {word.removesuffix("gib").removesuffix("gb") for word in _words(name)}
    words -= {"", "nvidia", "geforce"}
    matches = [
        known
        for known in SPECIFICATIONS
        if words and words <= _words(known.gpu) | {str(known.memory_gib)}
    ]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(one.gpu for one in matches or SPECIFICATIONS)
    problem = "matches several devices" if matches else "is not a known device"
    raise ValueError(f"{name!r} {problem}; use one of {names}")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))
