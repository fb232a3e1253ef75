"""`gradients_zeroed`: a backward whose gradients do not count, for engines that need one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


@contextmanager
def gradients_zeroed(loss: Tensor) -> Iterator[None]:
    """Gradients that a backward of `loss` adds to parameters are exactly 0, also if it is NaN.

    A factor of 0 would not do: the mean over an empty set is NaN, and 0 * NaN is NaN. Functions
    written in Python get zeros too, because they may run a backward of their own, to parameters
    that are not in this graph: reentrant checkpointing does.
    """

    def zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    handles = [node.register_prehook(zeros) for node in _reaching_parameters(loss)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reaching_parameters(loss: Tensor) -> list[Any]:
    """The nodes of the autograd graph that add gradients to parameters, or may do so inside."""
    found, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") or isinstance(node, BackwardCFunction):
            found.append(node)
        stack += [following for following, _ in node.next_functions]
    return found
