"""Peak memory of a pass: what CUDA's allocator reserves for it, or live tensors on the CPU.

On CUDA a pass needs what the allocator reserves, which is more than its live tensors if memory is
fragmented. On the CPU resident memory does not show live tensors, because glibc keeps freed memory.
So every storage that an operator allocates is counted until it is freed, and what an operator
allocates for itself while it runs (`kernel_memory`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar.data import pytree
from poplar.profiler.compilation import eagerly
from poplar.profiler.kernel_memory import KernelMemory
from poplar.profiler.unit_memory import TrainedUnit, UnitBytes, UnitWindows


class PassBytes(NamedTuple):
    """What a pass needs above the tensors before it."""

    peak: int
    units: UnitBytes = UnitBytes()


def pass_bytes(
    run: Callable[[], None], device: torch.device, units: Sequence[TrainedUnit] = ()
) -> PassBytes:
    """Bytes that `run` needs above the tensors before it, in all and by unit.

    On CUDA memory that other passes left in the allocator's cache is returned first, and does not
    count. What fragmentation adds to the peak counts for every unit in proportion. On the CPU
    compiled functions are counted as they run eagerly, usually with more memory.
    """
    windows = UnitWindows(units)
    if device.type != "cuda":
        with eagerly(), _LiveStorages() as storages, windows.measuring(storages):
            run()
        return PassBytes(storages.highest, windows.result())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated = _Allocated(device)
    with windows.measuring(allocated):
        run()
    torch.cuda.synchronize(device)
    allocated.begin_window()
    fragmented = allocated.reserved / allocated.highest if allocated.highest else 1.0
    return PassBytes(allocated.reserved, windows.result().times(max(1.0, fragmented)))


def batch_bytes(batch: Any, device: torch.device) -> int:
    """Bytes of a batch on an accelerator, where it lies beside the activations; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    on_device = [tensor for tensor in pytree.tensors(batch) if tensor.device.type == device.type]
    return sum(storage.nbytes() for storage in _storages(on_device).values())


def model_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, buffers and gradients of a model; shared memory counts once.

    Nothing on `meta` counts.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = [*parameters, *model.buffers(), *gradients]
    real = [tensor for tensor in tensors if not tensor.is_meta]
    return sum(storage.nbytes() for storage in _storages(real).values())


class _Allocated:
    """What torch's CUDA allocator has allocated since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)
        self.highest = self.reserved = 0
        """Most allocated and most reserved bytes before the present window."""

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def begin_window(self) -> None:
        self.highest = max(self.highest, self.peak)
        reserved = torch.cuda.max_memory_reserved(self._device) - self._before
        self.reserved = max(self.reserved, reserved)
        torch.cuda.reset_peak_memory_stats(self._device)


class _LiveStorages(TorchDispatchMode):
    """Counts bytes of storages that operators return and that were not among their arguments, and
    what operators need beside them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.highest = 0
        """Bytes now, at most since `begin_window`, and at most at all."""
        self._known: set[int] = set()
        self._kernels = KernelMemory()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = _storages((args, kwargs))
        nbytes = sum(storage.nbytes() for storage in given.values())
        result, temporary = self._kernels.measure(
            func, (args, kwargs), nbytes, lambda: func(*args, **(kwargs or {}))
        )
        for key, storage in _storages(result).items():
            if key not in given and key not in self._known:
                self._known.add(key)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._remove, key, storage.nbytes())
        self.peak = max(self.peak, self.live + temporary)
        self.highest = max(self.highest, self.live + temporary)
        return result

    def begin_window(self) -> None:
        self.peak = self.live

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in a pytree, by identity."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in storages}
