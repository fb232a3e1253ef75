"""Contexts that see each call of a torch function while a loss function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from poplar.values.errors import NotExportable


class Exported(TorchFunctionMode):
    """A context in which functions are called as a graph of `torch.export` needs it.

    Functions that run without gradients read detached tensors: `torch.export` puts operators under
    `torch.no_grad()` into subgraphs, unless they are also under `torch.autocast`, and
    `run_decompositions` inlines the subgraphs without a trace of the mode.

    Mean losses of classes are a sum and a count, so that each rank can add up its own samples: the
    mean is over the targets that are not ignored, on all ranks, so it is not a weighted mean of the
    ranks' means with weights that are known beforehand.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() and not _is_attribute(func):
            args, kwargs = tree_map(_detached, (args, kwargs))
        if func in (functional.cross_entropy, functional.nll_loss):
            return _class_loss(func, *args, **kwargs)
        return func(*args, **kwargs)


class HooksRefused(TorchFunctionMode):
    """A context in which no tensor gets a hook."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise NotExportable(
                f"the forward pass calls {func.__name__}() on a tensor, and a graph has no hooks"
            )
        return func(*args, **(kwargs or {}))


def _class_loss(
    func: Callable[..., Any],
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    *others: Any,
    **options: Any,
) -> Any:
    """A mean loss as a sum and a count; not with class weights or probabilities as targets."""
    given = {name for name, value in options.items() if value is not None}
    is_known = not others and given <= {"ignore_index", "reduction", "label_smoothing"}
    is_mean = is_known and options.get("reduction", "mean") == "mean"
    if not is_mean or weight is not None or target.is_floating_point():
        return func(input, target, weight, *others, **options)
    losses = func(input, target, **{**options, "reduction": "none"})
    # The sum of many targets may be above the largest number of fp16.
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    mean = total / (target != options.get("ignore_index", -100)).sum()
    return mean.to(losses.dtype)


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Whether it reads or sets something of a tensor, such as its shape, and computes nothing."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "requires_grad_")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
