"""A task to time: one operation, by Poplar and by the torch code it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Way:
    """One implementation of a task."""

    run: Callable[[], object]
    """The code to time. It names the device of every tensor that it creates (see `Task`)."""
    result: Callable[[], Tensor]
    """The result after a run, which all implementations must agree on up to rounding."""
    prepare: Callable[[], object] = lambda: None
    """Called before each run, not timed: restores what a run changes."""


@dataclass(frozen=True)
class Task:
    """One operation in several implementations; all are compared with the first one's result.

    There is no default device, because `torch.set_default_device` adds a mode to every torch call
    from Python, which would make implementations with many calls two to three times slower.
    """

    name: str
    numel: int
    least_bytes: int
    """Bytes that any implementation must read and write at least."""
    ways: Mapping[str, Way]
    usual: str
    """The most common implementation."""
    tolerance: float = 1e-4
    """Allowed difference, relative to the largest element and to each element."""
    device: str = "cpu"
    """`cpu` or `cuda`: the device of the tensors."""
