"""Contexts that see each call of a torch function while a loss function runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from poplar.values.errors import NotExportable


class _CallMode(TorchFunctionMode):
    """A context in which `call` stands for every function of torch."""

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function."""
        return func(*args, **kwargs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})


class GradientModesKept(_CallMode):
    """A context in which functions that run without gradients read detached tensors.

    `torch.export` puts operators under `torch.no_grad()` into subgraphs, unless they are also under
    `torch.autocast`, and `run_decompositions` inlines the subgraphs without a trace of the mode.
    Detached tensors are kept in a graph.
    """

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled() and not _is_attribute(func):
            args, kwargs = tree_map(_detached, (args, kwargs))
        return func(*args, **kwargs)


class HooksRefused(_CallMode):
    """A context in which no tensor gets a hook."""

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is Tensor.register_hook:
            raise NotExportable(
                "the forward pass calls register_hook() on a tensor, and a graph has no hooks"
            )
        return func(*args, **kwargs)


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Whether it reads or sets something of a tensor, such as its shape, and computes nothing."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
