"""The graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes_from(start: Any) -> Iterator[Any]:
    """A node, such as the `grad_fn` of a loss, and all that its backward reaches, each once."""
    waiting = [] if start is None else [start]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def leaf_of(node: Any) -> Tensor | None:
    """The tensor to whose `.grad` a node adds; None for other nodes."""
    # A Function written in Python may have an attribute of this name, too.
    is_leaf = type(node).__name__ == "AccumulateGrad"
    return node.variable if is_leaf else None
