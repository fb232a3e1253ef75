"""Memory that a CPU operator allocates for itself and frees before it returns.

Convolutions of oneDNN copy their inputs into another layout, for example. No tensor shows that, so
the peak of the process's resident memory is compared with what remains after the operator. glibc
keeps freed memory resident, so it is told to return it before and after.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

SMALLEST = 512 << 10
"""Fewer bytes do not count: the system counts pages per thread, and adds them up now and then."""
_LEAST_BYTES = 1 << 20
"""An operator on smaller tensors is not measured."""
_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


class KernelMemory:
    """Measures each operator once for the same shapes and options."""

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
            run: calls it.

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
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def _status(name: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROCESS / 'status'} has no {name}")
