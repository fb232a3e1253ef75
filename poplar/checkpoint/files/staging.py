"""A copy of what a rank writes, in host memory, so that training goes on while it is written."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from poplar.checkpoint.files.data_file import Pickled

_ALIGNMENT = 64
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all devices."""
_ADVICE = "free host memory, or save to a folder with CheckpointManager(asynchronous=False)"


class Staging:
    """One buffer, pinned if the tensors are on CUDA devices, that is used for every copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._unpin: Callable[[], object] = lambda: None

    @torch.no_grad()
    def copy(self, values: Mapping[MetadataIndex, Any]) -> dict[MetadataIndex, Any]:
        """Copy tensors into the buffer, and pickle other values that may change."""
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        self._reserve(sum(_padded(t.nbytes) for t in tensors), any(t.is_cuda for t in tensors))
        copies: dict[MetadataIndex, Any] = {}
        start = 0
        for index, value in values.items():
            if not isinstance(value, Tensor):
                copies[index] = Pickled.of(value)
                continue
            place = self._buffer[start : start + value.nbytes].view(value.dtype).view(value.shape)
            copies[index] = place.copy_(value, non_blocking=True)
            start += _padded(value.nbytes)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _reserve(self, size: int, pinned: bool) -> None:
        if self._buffer.numel() >= size:
            return
        self._unpin()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # free it first
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if pinned:
            self._unpin = pin(self, self._buffer, _ADVICE)


def pin(owner: object, memory: Tensor, advice: str) -> Callable[[], object]:
    """Pin memory, as much as there is: `pin_memory=True` takes the next power of two.

    Returns:
        Ends it, as the end of `owner` does: later memory at this address could not be pinned. The
        memory is kept until then.

    Raises:
        RuntimeError: the driver refuses; the message ends with `advice`.
    """
    cuda = torch.cuda.cudart()
    failure = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if failure:
        raise RuntimeError(
            f"CUDA error {failure} while {memory.nbytes} bytes of host memory were pinned for a "
            f"copy of the training state; {advice}"
        )

    def unpin() -> None:
        cuda.cudaHostUnregister(memory.data_ptr())

    return weakref.finalize(owner, unpin)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
