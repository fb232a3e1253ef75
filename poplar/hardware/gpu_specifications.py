"""What vendors print of their devices: peak FLOP/s, memory, bandwidth, by the name a driver gives.

Only for what measuring cannot say: the `flops` policy plans by peaks, as Whale does, and a device
that is simulated has no clock. Figures are dense (no sparsity) fp16 tensor-core TFLOP/s, or plain
fp16 where a device has no tensor cores; `source` says where each was found, `recalled` marks what
nobody looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LISTS = "public spec lists"
_LISTS_LINK_RECALLED = "public spec lists; link recalled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Specification:
    """One kind of device, as its vendor describes it."""

    gpu: str
    words: tuple[str, ...]
    """What the name of such a device contains, whole words: "NVIDIA A100-SXM4-80GB" is cut at its
    spaces and dashes."""
    memory_gib: int
    half_tflops: float
    """Dense fp16, and bf16 where `bf16`."""
    memory_gb_per_s: float
    bf16: bool
    """Whether the device multiplies bf16; emulation does not count."""
    link: str
    link_gb_per_s_one_way: float
    source: str

    @property
    def half_flops(self) -> float:
        """Peak of fp16, in FLOP/s."""
        return self.half_tflops * 1e12


def _of(
    gpu: str,
    words: str,
    memory_gib: int,
    half_tflops: float,
    memory_gb_per_s: float,
    bf16: bool,
    link: str,
    link_gb_per_s_one_way: float,
    source: str,
) -> Specification:
    return Specification(
        gpu=gpu,
        words=tuple(words.split()),
        memory_gib=memory_gib,
        half_tflops=half_tflops,
        memory_gb_per_s=memory_gb_per_s,
        bf16=bf16,
        link=link,
        link_gb_per_s_one_way=link_gb_per_s_one_way,
        source=source,
    )


SPECIFICATIONS = (
    _of("P100", "p100", 16, 21.2, 732, False, "PCIe3", 16, _LISTS_LINK_RECALLED),
    _of("V100-SXM2-16", "v100 sxm2 16gb", 16, 125, 900, False, "NVLink2", 150, _LISTS),
    _of("V100-SXM2-32", "v100 sxm2 32gb", 32, 125, 900, False, "NVLink2", 150, _LISTS),
    _of("V100-PCIe-16", "v100 pcie 16gb", 16, 112, 900, False, "PCIe3", 16, _LISTS_LINK_RECALLED),
    _of("V100S-PCIe-32", "v100s", 32, 130, 1134, False, "PCIe3", 16, _LISTS_LINK_RECALLED),
    _of("T4", "t4", 16, 65, 320, False, "PCIe3", 16, _LISTS_LINK_RECALLED),
    _of("A100-PCIe-40", "a100 pcie 40gb", 40, 312, 1555, True, "PCIe4", 32, _LISTS_LINK_RECALLED),
    _of("A100-SXM-40", "a100 sxm4 40gb", 40, 312, 1555, True, "NVLink3", 300, _LISTS),
    _of("A100-SXM-80", "a100 sxm4 80gb", 80, 312, 2039, True, "NVLink3", 300, _LISTS),
    _of("A800-80", "a800 80gb", 80, 312, 2039, True, "NVLink", 200, "recalled"),
    _of("L4", "l4", 24, 121, 300, True, "PCIe4", 32, _LISTS_LINK_RECALLED),
    _of(
        "RTX-3090",
        "rtx 3090",
        24,
        71,
        936,
        True,
        "PCIe4",
        32,
        "recalled (fp32 accumulate); bandwidth from spec lists",
    ),
    _of(
        "RTX-4090",
        "rtx 4090",
        24,
        165.2,
        1008,
        True,
        "PCIe4",
        32,
        "public spec lists; no peer-to-peer (recalled)",
    ),
    _of("RTX-A6000", "rtx a6000", 48, 154.8, 768, True, "PCIe4", 32, _LISTS_LINK_RECALLED),
    _of("H100-PCIe-80", "h100 pcie", 80, 756, 2000, True, "PCIe5", 64, _LISTS_LINK_RECALLED),
    _of("H100-SXM-80", "h100 80gb hbm3", 80, 989, 3350, True, "NVLink4", 450, _LISTS),
    _of("H200-SXM-141", "h200", 141, 989, 4800, True, "NVLink4", 450, _LISTS),
)

_OTHER_KINDS = frozenset({"ti", "super", "laptop", "mobile", "max", "nvl", "mig", "d", "ada"})
"""Words that make a device another one than its plain namesake: its peak is not in the table."""


def specification(name: str) -> Specification | None:
    """What is printed of the device with this name (as the driver says it), if it is in the table.

    Variants that the table does not have (a laptop's chip, a slice of a device) are None rather
    than their nearest relative.
    """
    words = set(re.split(r"[^a-z0-9.]+", name.lower()))
    if words & _OTHER_KINDS:
        return None
    fitting = [known for known in SPECIFICATIONS if words.issuperset(known.words)]
    return max(fitting, key=lambda known: len(known.words), default=None)
