"""Keeps in an exported graph which operators ran under `torch.no_grad()`.

`torch.export` puts these operators into subgraphs, unless they are also under `torch.autocast`, and
`run_decompositions` inlines the subgraphs without a trace of the mode. So these operators read
detached tensors, which a graph holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class GradientModesKept(TorchFunctionMode):
    """A context in which functions that run without gradients read detached tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args, kwargs or {}
        if not torch.is_grad_enabled() and not _is_attribute(func):
            given = tree_map(_detached, given)
        return func(*given[0], **given[1])


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Whether it reads or sets something of a tensor, such as its shape, and computes nothing."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
