"""What is timed: one thing to do, by Poplar and by what a user would launch instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Way:
    """One way to do it."""

    run: Callable[[], object]
    """Names the device of every tensor that it makes: nothing sets a default one (see `Task`)."""
    result: Callable[[], Tensor]
    """Once it has run: what has to be the same by all ways, to rounding."""
    prepare: Callable[[], object] = lambda: None
    """Before each run, not timed: what a run would find changed by the one before."""


@dataclass(frozen=True)
class Task:
    """The same by several ways; all are held against the first one's result.

    A default device (`torch.set_default_device`) is a mode that every call of torch from Python
    passes through; ways with many calls would be timed two or three times too slow.
    """

    name: str
    numel: int
    least_bytes: int
    """That have to be read and written by the best program there could be."""
    ways: Mapping[str, Way]
    usual: str
    """The way that most programs go."""
    tolerance: float = 1e-4
    """Of the largest element, and of each: by how much ways may differ."""
    device: str = "cpu"
    """`cpu` or `cuda`: where the tensors are."""
