"""Peak memory of a pass: what CUDA's allocator reserves for it, or live tensors on the CPU.

On CUDA a pass needs what the allocator reserves, which is more than its live tensors if memory is
fragmented. On the CPU resident memory does not show live tensors, because glibc keeps freed memory.
So every storage that an operator allocates is counted until it is freed, and what an operator
allocates for itself while it runs (`KernelMemory`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from poplar.data.object_content import arrays_in
from poplar.profiler.compilation import eagerly
from poplar.profiler.unit_hooks import TrainedUnit
from poplar.system.storage import dense_parts
from poplar.zero.opaque_parameter import component_tensors

T = TypeVar("T")

SMALLEST = 512 << 10
"""Fewer bytes do not count: the system counts pages per thread, and adds them up now and then."""
_LEAST_BYTES = 1 << 20
"""An operator on smaller tensors is not measured."""
_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


class PassBytes(NamedTuple):
    """What a pass needs above the tensors before it."""

    peak: int
    during: tuple[int, ...] = ()
    """`BatchPoint.unit_bytes`."""
    after: tuple[int, ...] = ()
    """`BatchPoint.bytes_after_unit`."""

    def plus(self, added: int) -> PassBytes:
        """Each value and these bytes, at least 0."""
        during, after = (tuple(max(0, value + added) for value in each) for each in self[1:])
        return PassBytes(max(0, self.peak + added), during, after)


def pass_bytes(
    run: Callable[[], None], device: torch.device, units: Sequence[TrainedUnit] = ()
) -> PassBytes:
    """Bytes that `run` needs above the tensors before it, in all and by unit.

    On CUDA memory that other passes left in the allocator's cache is returned first, and does not
    count. What fragmentation adds to the peak counts for every unit in proportion. On the CPU
    compiled functions are counted as they run eagerly, usually with more memory.
    """
    windows = _UnitWindows(units)
    if counts_tensors(device):
        with eagerly(), _LiveStorages() as storages, windows.measuring(storages):
            run()
        return PassBytes(storages.highest, *windows.result())
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allocated = _Allocated(device)
    with windows.measuring(allocated):
        run()
    torch.cuda.synchronize(device)
    allocated.begin_window()
    fragmented = allocated.reserved / allocated.highest if allocated.highest else 1.0
    return PassBytes(allocated.reserved, *windows.result(times=max(1.0, fragmented)))


def counts_tensors(device: torch.device) -> bool:
    """Whether `pass_bytes` counts tensors: then a first pass needs as much as later ones do."""
    return device.type != "cuda"


def batch_bytes(batch: Any, device: torch.device) -> int:
    """Bytes of a batch on an accelerator, where it lies beside the activations; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    tensors = [array for array in arrays_in(batch)[0] if isinstance(array, Tensor)]
    on_device = [tensor for tensor in tensors if tensor.device.type == device.type]
    return sum(storage.nbytes() for storage in _storages(on_device).values())


def model_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes on a device of the parameters, buffers and gradients of a model.

    Shared memory counts once.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = [part for t in (*parameters, *model.buffers()) for part in component_tensors(t)]
    on_device = [tensor for tensor in (*held, *gradients) if tensor.device == device]
    return sum(storage.nbytes() for storage in _storages(on_device).values())


class _UnitWindows:
    """The windows of one pass: each ends when the last gradient of a unit is complete.

    The gradients themselves are taken out, because how long they live depends on the stage. Those
    of a unit and of the resident units that the engine would hold are added to the peaks, as they
    are freed one by one when complete, and their full size is subtracted where the unit ends.
    """

    def __init__(self, units: Sequence[TrainedUnit]) -> None:
        self._units = units
        self._resident = sum(unit.gradient_bytes for unit in units if unit.resident)
        self._missing = [len(unit.parameters) for unit in units]
        self._during = [0] * len(units)
        self._after = [0] * len(units)
        self._held = 0
        """Gradients that are complete and that the engine would hold."""
        self._most = 0
        """The most in this window, with `_held`."""

    @contextmanager
    def measuring(self, meter: _Allocated | _LiveStorages) -> Iterator[None]:
        """Measure one pass inside. Every gradient must be freed by a hook that exists already."""
        self._meter = meter
        with ExitStack() as hooks:
            for number, unit in enumerate(self._units):
                for parameter in unit.parameters:
                    complete = partial(self._complete, number, parameter.nbytes)
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(complete))
            yield

    def result(self, times: float = 1.0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of each unit during and after its backward, so many times.

        Both are empty if a unit did not get all of its gradients.
        """
        if any(self._missing):
            return (), ()
        most = max(self._most, self._meter.peak + self._held) - self._resident
        for number, unit in enumerate(self._units):
            if unit.resident:
                self._during[number], self._after[number] = most, self._meter.live
        during, after = (
            tuple(int(max(0, value) * times) for value in each)
            for each in (self._during, self._after)
        )
        return during, after

    def _complete(self, number: int, nbytes: int, _parameter: Tensor) -> None:
        self._most = max(self._most, self._meter.peak + self._held)
        self._held += nbytes
        self._meter.begin_window()
        self._missing[number] -= 1
        unit = self._units[number]
        if self._missing[number] or unit.resident:
            return
        now, others = self._meter.live + self._held, unit.gradient_bytes + self._resident
        self._during[number] = max(self._most, now) - others
        self._after[number] = now - others
        self._held -= unit.gradient_bytes
        self._most = 0


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
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    storages = [part.untyped_storage() for tensor in tensors for part in dense_parts(tensor)]
    return {storage._cdata: storage for storage in storages}


class KernelMemory:
    """Measures what an operator allocates for itself, once for the same shapes and options.

    Convolutions of oneDNN copy their inputs into another layout, for example. No tensor shows that,
    so the peak of the process's resident memory is compared with what remains after the operator.
    glibc keeps freed memory resident, so it is told to return it before and after.
    """

    def __init__(self) -> None:
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._measured: dict[Hashable, int] = {}
        if self._malloc_trim is not None:
            try:
                self._run(lambda: None)  # the code that measures is resident from now on
            except OSError:  # no /proc
                self._malloc_trim = None

    def measure(
        self, operator: Hashable, arguments: Any, nbytes: int, run: Callable[[], T]
    ) -> tuple[T, int]:
        """Run an operator.

        Args:
            operator: equal for calls of the same one.
            arguments: a pytree with tensors.
            nbytes: of the tensors in `arguments`.

        Returns:
            Its result, and the bytes beside the result that it needed at most. 0 where that cannot
            be measured (neither Linux nor glibc).
        """
        if self._malloc_trim is None or nbytes < _LEAST_BYTES:
            return run(), 0
        key = (operator, *map(_describe, tree_leaves(arguments)))
        if key in self._measured:
            return run(), self._measured[key]
        result, found = self._run(run)
        self._measured[key] = found if found >= SMALLEST else 0
        return result, self._measured[key]

    def _run(self, run: Callable[[], T]) -> tuple[T, int]:
        assert self._malloc_trim is not None
        self._malloc_trim(0)
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        result = run()
        peak = _status("VmHWM")
        self._malloc_trim(0)
        return result, peak - _status("VmRSS")


def _describe(leaf: Any) -> Hashable:
    """What memory depends on."""
    if isinstance(leaf, Tensor):
        shape = () if leaf.is_nested else tuple(leaf.shape)
        parts = ((tuple(t.shape), tuple(t.stride()), t.dtype) for t in dense_parts(leaf))
        return shape, *parts
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def _status(name: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {name}")
