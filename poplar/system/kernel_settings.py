"""Settings of torch for the whole process that decide which kernels run."""

from __future__ import annotations

from operator import attrgetter

import torch

_PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv")
_EXACT = ("none", "ieee")
_SWITCHES = (
    *(f"backends.cuda.{kernel}_sdp_enabled" for kernel in ("flash", "mem_efficient", "math")),
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
    "are_deterministic_algorithms_enabled",
)


def precisions() -> str:
    """The backends whose products of fp32 values are less precise, and how precise.

    `torch.get_float32_matmul_precision` raises if a program has set it for one backend.
    """
    found = {name: attrgetter(name)(torch.backends).fp32_precision for name in _PRECISIONS}
    return ", ".join(f"{name} {kind}" for name, kind in found.items() if kind not in _EXACT)


def switches() -> str:
    """The names of the switches that are on."""
    found = {name: attrgetter(name)(torch) for name in _SWITCHES}
    on = (name for name, value in found.items() if (value() if callable(value) else value))
    return ", ".join(on)
