"""What a figure rests on: who serves Poplar's operators, and the versions underneath."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import provenance
import torch

from poplar import ops


def operators(device: str) -> str:
    """Who serves Poplar's operators there: `C++ (...)`, `Triton (...)`, `plain PyTorch (...)`."""
    on_cpu, _, on_cuda = ops.describe().removeprefix("operators on CPU: ").partition("; on CUDA: ")
    return on_cuda if device == "cuda" else on_cpu


@cache
def versions(device: str) -> str:
    """Of torch, the peers and Python; for a GPU also of Triton, CUDA and the driver."""
    if device != "cuda":
        return provenance.versions("torch", "deepspeed")
    said = provenance.versions("torch", "triton", "apex", "deepspeed")
    return f"{said}, CUDA {torch.version.cuda}, driver {_driver()}"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"
