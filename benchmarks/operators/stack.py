"""The environment of a measurement: provider of Poplar's operators, and versions."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import provenance
import torch

from poplar import ops


def operators(device: str) -> str:
    """The provider of Poplar's operators on this device, for example `C++ (libpoplar_ops.so)`."""
    return str(ops.providers()[device])


@cache
def versions(device: str) -> str:
    """Versions of torch, the peers and Python; for a GPU also of Triton, CUDA and the driver."""
    if device != "cuda":
        return provenance.versions("torch", "deepspeed")
    found = provenance.versions("torch", "triton", "apex", "deepspeed")
    return f"{found}, CUDA {torch.version.cuda}, driver {_driver()}"


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"
