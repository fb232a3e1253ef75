"""Peak memory of tensors during a pass, exact on CUDA and on the CPU.

Resident memory does not show live tensors, because glibc keeps freed memory. So on the CPU every
storage that an operator allocates is counted until it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Peak bytes of live tensors during `run`, above those before it."""
    if device.type != "cuda":
        with _LiveStorages() as storages:
            run()
        peak: int = storages.peak
        return peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


class _LiveStorages(TorchDispatchMode):
    """Counts bytes of storages that operators return and that were not among their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and _key(value) not in given | self._known:
                self._add(value)
        return result

    def _add(self, value: Tensor) -> None:
        storage, size = value.untyped_storage(), value.untyped_storage().nbytes()
        self._known.add(_key(value))
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, _key(value), size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _key(value: Tensor) -> int:
    key: int = value.untyped_storage()._cdata
    return key
