"""What must hold of a model before its parameters are taken over; each complaint says the way
out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from poplar.zero.flat_parameter import PACKABLE

_OWNERS: dict[int, weakref.ref[Any]] = {}


def reject_wrapped(model: nn.Module) -> None:
    """DDP and FSDP average gradients themselves, with equal weights, and undo ours.

    Raises:
        TypeError: the model, or a module in it, is wrapped.
    """
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        if wrapper:
            where = f"its module {name!r}" if name else "the model"
            raise TypeError(
                f"{where} is wrapped in {wrapper.pop()}, which averages gradients with equal "
                f"weights; "
                "give HeteroZeroOptimizer the bare model (model.module), it does the wrapper's work"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise TypeError(
                f"parameter {name!r} is a DTensor, so FSDP2 or tensor parallelism has sharded the "
                f"model; "
                "give HeteroZeroOptimizer the model as it was before"
            )


def batch_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """With their names."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]


def reject_batch_norm(named: Sequence[tuple[str, nn.Module]]) -> None:
    """
    Raises:
        ValueError: one of these `batch_norms` is in training mode.
    """
    for name, module in named:
        if module.training:
            raise ValueError(
                f"module {name!r} is a BatchNorm in training mode: its statistics couple the "
                f"samples of a "
                "micro-batch, so no cut of the batch gives the gradient of the whole. Use "
                "GroupNorm or "
                "LayerNorm, freeze it with .eval(), or accept statistics per micro-batch with "
                "allow_batch_norm=True"
            )


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], trained: set[int]) -> torch.device:
    """Check what flat buffers need of the parameters; returns their device.

    Raises:
        ValueError: no parameter to train, several devices, memory shared by two parameters, meta
        tensors.
        TypeError: a dtype that flat buffers don't take.
        RuntimeError: another living optimizer has them.
    """
    if not trained:
        raise ValueError("no parameter requires a gradient; there is nothing to optimize")
    devices = {parameter.device for _, parameter in named}
    if len(devices) != 1:
        raise ValueError(
            f"the parameters lie on {sorted(map(str, devices))}; a rank has one device: "
            f"model.to(device) first"
        )
    at: dict[int, str] = {}
    for name, parameter in named:
        other = _OWNERS.get(id(parameter))
        if other is not None and other() is not None:
            raise RuntimeError(
                f"parameter {name!r} already belongs to another HeteroZeroOptimizer; one "
                "optimizer holds a model: profile it before the optimizer is built, call "
                "release() on that one first, or use parameter groups for different "
                "hyper-parameters"
            )
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            raise ValueError(
                f"parameter {name!r} has no memory of its own: it was sharded by an optimizer that "
                "is gone. Build the model anew; a checkpoint of it: save_model(), or "
                "full_parameters(), before the optimizer goes"
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device; initialise it first: "
                "model.to_empty(device=...) and its own initialisation"
            )
        if id(parameter) in trained and parameter.dtype not in PACKABLE:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; trained parameters must be float32, "
                f"bfloat16 or float16"
            )
        if parameter.numel() and at.setdefault(parameter.data_ptr(), name) != name:
            raise ValueError(
                f"parameters {at[parameter.data_ptr()]!r} and {name!r} are different objects in "
                f"the same memory; "
                "tie them as one nn.Parameter: module_b.weight = module_a.weight"
            )
    return next(iter(devices))


def register_owner(
    named: Sequence[tuple[str, nn.Parameter]], owner: object, hooks: Sequence[RemovableHandle]
) -> Callable[[], object]:
    """Note whose the parameters are, for as long as `owner` lives; its hooks go with it.

    Returns:
        What ends that before its time.
    """
    reference = weakref.ref(owner)
    keys = [id(parameter) for _, parameter in named]
    for key in keys:
        _OWNERS[key] = reference

    def forget() -> None:
        for hook in hooks:
            hook.remove()
        for key in keys:
            if _OWNERS.get(key) is reference:
                del _OWNERS[key]

    return weakref.finalize(owner, forget)
