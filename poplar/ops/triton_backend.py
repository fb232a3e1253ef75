"""The CUDA operators in Triton, used where the C++ library was not built; they need no nvcc.

They give the bits of plain PyTorch, which serves devices that Triton does not support, and those on
which no kernel can be launched (Triton needs a C compiler and Python's headers once).
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from poplar.ops import plain

SUPPORTED_CAPABILITY = (8, 0)
"""The lowest compute capability that Triton supports."""


def is_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _operator(name: str) -> Callable[..., Any]:
    """An operator by the provider for the device of its tensors."""

    def run(*arguments: Any) -> Any:
        first = arguments[0]
        tensors = [first] if isinstance(first, Tensor) else first
        # No tensors: there is nothing to update.
        return getattr(_provider_on(tensors[0].device), name)(*arguments) if tensors else None

    return run


FUNCTIONS = {
    name: _operator(name)
    for name in plain.FUNCTIONS
    if name not in ("copy_", "rank_sum_chunks_")  # for host memory
}


class _KernelsOnDevice:
    """Launches the kernels on one device, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            from poplar import kernels  # imported late, because importing Triton is slow

            with torch.cuda.device(self._device):
                return getattr(kernels, name)(*arguments)

        return launch


@functools.cache
def _provider_on(device: torch.device) -> Any:
    """The provider for a device: the kernels, or plain PyTorch."""
    kernels = _KernelsOnDevice(device)
    reason = problem_of(kernels, device)
    if not reason:
        return kernels
    warnings.warn(
        f"Triton's kernels do not run on {torch.cuda.get_device_name(device)} ({reason}); using "
        "plain PyTorch, which is slower. Build Poplar with nvcc to get the C++ operators",
        stacklevel=3,
    )
    return plain


def problem_of(kernels: Any, device: torch.device) -> str:
    """Why no kernel can be launched; empty if one can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < SUPPORTED_CAPABILITY:
        return "Triton supports capability {}.{} and higher, not {}.{}".format(
            *SUPPORTED_CAPABILITY, *capability
        )
    try:
        kernels.block_sums_of_squares(torch.zeros(64, device=device))
    except Exception as error:  # a missing compiler raises many types of errors
        return f"launch failed: {type(error).__name__}: {error}"
    return ""
