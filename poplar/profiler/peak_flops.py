"""Peak FLOP/s of a device: from its specification, else measured by a large matrix product."""

from __future__ import annotations

import torch

from poplar.hardware.gpu_specifications import specification
from poplar.profiler.timing import median_seconds
from poplar.system.devices import checked_kind

_HALF = (torch.float16, torch.bfloat16)
_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
"""Large enough for a product to be bound by arithmetic, not by memory or launches."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of matrix products in `dtype`; None if the device cannot multiply `dtype`.

    From the specification for fp16 and bf16 on known GPUs, else measured in under a second.
    """
    if checked_kind(device) == "cuda" and dtype in _HALF:
        printed = specification(torch.cuda.get_device_name(device))
        if printed is not None and (printed.bf16 or dtype != torch.bfloat16):
            return printed.half_flops
    try:
        return measure_flops(device, dtype)
    except (RuntimeError, TypeError):
        return None


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product. Does not change random state.

    Raises:
        RuntimeError: this device cannot multiply `dtype`, or has no memory for it.
    """
    side = _MATRIX_SIDE[checked_kind(device)]
    generator = torch.Generator(device).manual_seed(0)
    # Random values: products of constants draw less power and run at higher clocks.
    matrix = torch.randn(side, side, generator=generator, device=device).to(dtype)
    out = torch.empty_like(matrix)
    return 2 * side**3 / median_seconds(lambda: torch.mm(matrix, matrix, out=out), device)
