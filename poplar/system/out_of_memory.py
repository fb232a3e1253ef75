"""Recognizes that memory ran out, on CUDA and on the CPU, and frees what the failed work held.

CUDA's allocator raises `torch.OutOfMemoryError`. On the CPU the same failure is a `RuntimeError` of
torch's allocator, a `MemoryError` of Python, or a `std::bad_alloc` of a C++ library.
"""

from __future__ import annotations

import errno
import traceback

import torch

from poplar.values.errors import PoplarError

_TEXTS = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",  # on Windows
    "std::bad_alloc",
    "cannot allocate memory",  # the text of ENOMEM, as of a failed mmap
    "cuda error: out of memory",  # outside torch's allocator
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
)
"""Lower-case parts of the messages of a `RuntimeError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that memory ran out, on any device.

    Poplar's own errors do not, although they may quote such a message of another rank.
    """
    if isinstance(error, PoplarError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(part in text for part in _TEXTS)


def free_frames(error: BaseException) -> None:
    """Free the local variables of the functions that raised this error and its causes.

    They hold the activations of a failed pass. Functions that still run keep their variables.
    """
    seen: set[int] = set()
    remaining: list[BaseException | None] = [error]
    while remaining:
        each = remaining.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            remaining += [each.__cause__, each.__context__]


def free_failed_pass(error: BaseException) -> None:
    """Free what a pass held that raised this error. Not for use inside of a backward.

    Nodes that were ready when a backward failed stay in autograd's queue of this thread, with all
    they need, until the next backward takes them out: here that of a single number.
    """
    free_frames(error)
    torch.ones((), requires_grad=True, device="cpu").backward()


def free_cached_memory(device: torch.device) -> None:
    """Return what torch's allocator caches for later tensors to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
