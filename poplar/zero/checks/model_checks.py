"""Checks of a model before the optimizer takes over its parameters, and a registry of owners."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poplar.system.autograd_graph import leaf_of, nodes_from
from poplar.values.formatting import format_names
from poplar.zero.absent_parameter import AbsentValues
from poplar.zero.flat_parameter import PACKABLE
from poplar.zero.model_hook import Removable
from poplar.zero.opaque_parameter import is_opaque

_OWNERS: dict[int, weakref.ref[Any]] = {}


def reject_wrapped(model: nn.Module) -> None:
    """Reject DDP and FSDP, which average gradients with equal weights."""
    for name, module in model.named_modules():
        classes = {cls.__name__ for cls in type(module).__mro__}
        wrapper = classes & {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        if wrapper:
            where = f"its module {name!r}" if name else "the model"
            raise TypeError(
                f"{where} is wrapped in {wrapper.pop()}, which averages gradients with equal "
                "weights; pass the unwrapped model (model.module) to HeteroZeroOptimizer, which "
                "replaces the wrapper"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise TypeError(
                f"parameter {name!r} is a DTensor, so FSDP2 or tensor parallelism has sharded the "
                "model; pass the model to HeteroZeroOptimizer before it is sharded"
            )


def reject_scripted(model: nn.Module) -> None:
    """Reject modules of TorchScript, which take no hooks."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name!r}" if name else "the model"
            raise TypeError(
                f"{where} is a {type(module).__name__} of TorchScript, which takes no hooks; pass "
                "it as it was before torch.jit.script() or trace(), or, if it is frozen, keep it "
                "out of the model's modules, such as in a list"
            )


class BatchNorm(NamedTuple):
    """A BatchNorm module of a model."""

    name: str
    module: _BatchNorm
    keeps_none: bool
    """No running statistics, so it has no evaluation mode."""


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """The BatchNorm modules of a model."""
    return [
        BatchNorm(name, module, keeps_none=module.running_mean is None)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    ]


def taking_batch_statistics(norms: Sequence[BatchNorm]) -> list[BatchNorm]:
    """Those whose forward takes the statistics of a micro-batch."""
    return [norm for norm in norms if norm.keeps_none or norm.module.training]


def reject_batch_norm(norms: Sequence[BatchNorm], *, allowed: bool) -> None:
    """Reject `batch_norms` that take the statistics of a micro-batch; if these are allowed, those
    that communicate.
    """
    for norm in taking_batch_statistics(norms):
        if isinstance(norm.module, nn.SyncBatchNorm) and _communicates(norm.module):
            raise ValueError(
                f"module {norm.name!r} is a SyncBatchNorm in training mode: its communication in "
                "every pass assumes that all ranks run equally many passes of equal weight, so it "
                "can hang or give a wrong gradient, also with allow_forward_state=True. Use "
                "GroupNorm or LayerNorm, freeze it with .eval(), or use a plain BatchNorm, whose "
                "statistics per micro-batch allow_forward_state=True accepts"
            )
        if not allowed:
            kind, freeze = "in training mode", "freeze it with .eval()"
            if norm.keeps_none:
                kind = "with track_running_stats=False, which has no evaluation mode"
                freeze = "build it with track_running_stats=True and freeze it with .eval()"
            raise ValueError(
                f"module {norm.name!r} is a BatchNorm {kind}: its statistics couple the "
                "samples of a micro-batch, so the gradient depends on how the batch is split. Use "
                f"GroupNorm or LayerNorm, {freeze}, or accept statistics per "
                "micro-batch with allow_forward_state=True"
            )


def _communicates(module: nn.SyncBatchNorm) -> bool:
    """Whether it takes its statistics from several ranks."""
    return (
        module.training and dist.is_initialized() and dist.get_world_size(module.process_group) > 1
    )


def reject_sparse_embeddings(model: nn.Module) -> None:
    """Reject embeddings that are trained with sparse gradients."""
    for name, _ in _trained_embeddings(model, "sparse"):
        raise TypeError(
            f"module {name!r} has sparse gradients, but flat parameters are dense; build the "
            "embedding with sparse=False"
        )


def reject_embeddings_by_micro_batch(model: nn.Module, *, allowed: bool) -> None:
    """Reject trained embeddings that depend on what else is in a micro-batch.

    `allowed`: as for `reject_batch_norm`; gradients may be scaled by the counts of a micro-batch.
    """
    for name, module in _trained_embeddings(model, "max_norm", "scale_grad_by_freq"):
        if module.max_norm:
            kept = f"torch.renorm(weight, {module.norm_type}, 0, {module.max_norm})"
            raise ValueError(
                f"module {name!r} has max_norm={module.max_norm}, so its forwards write into its "
                "trained weights, also in evaluation mode: every rank would write the rows of its "
                "own samples. Build it with max_norm=None. Before the first step and after each "
                f"one, write weight.copy_({kept}), where weight is that of the module, in `with "
                "torch.no_grad(), optimizer.full_parameters(writeback=True, masters=True):`"
            )
        if not allowed:
            raise ValueError(
                f"module {name!r} has scale_grad_by_freq=True, which divides gradients by the "
                "counts of a micro-batch, so the gradient depends on how the batch is split. Build "
                "it with scale_grad_by_freq=False, or accept counts per micro-batch with "
                "allow_forward_state=True"
            )


def _trained_embeddings(model: nn.Module, *options: str) -> Iterator[tuple[str, Any]]:
    """Names and modules of those with one of these options.

    The weights of others are not read, which a parametrization would compute.
    """
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        has_option = is_embedding and any(getattr(module, option) for option in options)
        if has_option and module.weight.requires_grad:
            yield name, module


def reject_sparse_buffers(model: nn.Module) -> None:
    """Reject buffers that are not dense: the ranks compare and send buffers as bytes."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise TypeError(
                f"buffer {name!r} is {buffer.layout}, but ranks compare and send dense buffers; "
                "make it a plain attribute that is equal on all ranks, or register its to_dense()"
            )


def check_parameters(named: Sequence[tuple[str, nn.Parameter]], trained: set[int]) -> torch.device:
    """Check that the parameters can be laid out in flat parameters; returns their device."""
    if not trained:
        raise ValueError("no parameter requires a gradient; there is nothing to optimize")
    devices = {parameter.device for _, parameter in named}
    on_meta = [name for name, parameter in named if parameter.is_meta]
    if on_meta and len(devices) > 1:
        raise ValueError(
            f"parameter {on_meta[0]!r} is on meta and others are not; build the whole model on "
            "meta, or none of it"
        )
    if len(devices) != 1:
        raise ValueError(
            f"the parameters are on {sorted(map(str, devices))}, but a rank has one device; call "
            "model.to(device) first"
        )
    at: dict[int, str] = {}
    for name, parameter in named:
        other = _OWNERS.get(id(parameter))
        if other is not None and other() is not None:
            raise RuntimeError(
                f"parameter {name!r} already belongs to another HeteroZeroOptimizer. Profile "
                "the model before building its optimizer, call release() on that optimizer first, "
                "or use param groups for different hyper-parameters"
            )
        if isinstance(parameter, AbsentValues):
            raise ValueError(
                f"parameter {name!r} has no memory: it was sharded by an optimizer that no longer "
                "exists. Build the model again. To keep its values, call save_model() or release() "
                "while the optimizer exists"
            )
        is_trained = id(parameter) in trained
        if is_trained and (
            parameter.dtype not in PACKABLE or is_traceable_wrapper_subclass(parameter)
        ):
            raise TypeError(
                f"parameter {name!r} is a {type(parameter).__name__} of {parameter.dtype}; trained "
                f"parameters must be float32, bfloat16 or float16. {_advice_for(parameter)}"
            )
        if not is_trained and is_opaque(parameter):
            continue  # see [Note: opaque tensors]
        if parameter.is_inference():
            raise ValueError(
                f"parameter {name!r} was made in torch.inference_mode(), so it can never be "
                "trained; build the model outside of it (torch.no_grad() is allowed)"
            )
        if parameter.layout is not torch.strided:
            raise TypeError(
                f"parameter {name!r} is {parameter.layout}, but flat parameters are dense; make it "
                "an nn.Parameter of its to_dense()"
            )
        size = parameter.numel() * parameter.element_size()
        if not on_meta and parameter.untyped_storage().nbytes() < size:
            raise ValueError(
                f"elements of parameter {name!r} share memory (expand), so they cannot have "
                "gradients of their own; make it an nn.Parameter of its clone()"
            )
        if not on_meta and parameter.numel() and at.setdefault(parameter.data_ptr(), name) != name:
            raise ValueError(
                f"parameters {at[parameter.data_ptr()]!r} and {name!r} are different objects in "
                "the same memory; tie them as one nn.Parameter: module_b.weight = module_a.weight"
            )
    return next(iter(devices))


def _advice_for(parameter: nn.Parameter) -> str:
    """What to do about a trained parameter of an unsupported dtype."""
    if parameter.is_complex():
        return (
            "Store its real form, nn.Parameter(torch.view_as_real(w)), call "
            "torch.view_as_complex(parameter) in the forward, and pass compute_dtype=torch.float32 "
            "(there are no complex numbers of bfloat16)"
        )
    if parameter.dtype is torch.float64:
        return "Call model.float() before the optimizer is built"
    return "Freeze a quantised base (requires_grad_(False)) and train adapters such as LoRA"


def warn_of_ungrouped(
    named: Sequence[tuple[str, nn.Parameter]], trained: set[int], *, stacklevel: int
) -> None:
    """Warn of parameters whose gradients are not reduced. They may be meant to stay untrained."""
    names = [name for name, p in named if p.requires_grad and id(p) not in trained]
    if names:
        warnings.warn(
            "parameters that require a gradient, but are in no param group: "
            f"{format_names(names)}. Every rank keeps the gradient of its own samples for them, so "
            "another optimizer would train different values on every rank. Freeze them with "
            "requires_grad_(False), or train them here: a param group may have its own "
            "'optimizer_class'",
            stacklevel=stacklevel + 1,
        )


def warn_of_outside(model: nn.Module, loss: Tensor, *, stacklevel: int) -> None:
    """Warn of parameters in the graph of a loss that are not in the model.

    Those of models that have a `HeteroZeroOptimizer` are left out: their gradients raise.
    """
    own = set(map(id, model.parameters()))
    shapes = [
        str(tuple(leaf.shape))
        for leaf in map(leaf_of, nodes_from(loss.grad_fn))
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own and id(leaf) not in _OWNERS
    ]
    if shapes:
        warnings.warn(
            "the loss trains parameters that are not in the model of the optimizer, with the "
            f"shape(s) {format_names(shapes)}. Every rank keeps the gradient of its own samples "
            "for them, so another optimizer would train different values on every rank. Make them "
            "part of the model, such as nn.ModuleDict({'model': model, 'criterion': criterion}), "
            "before the optimizer is built, or freeze them with requires_grad_(False); what no "
            "optimizer trains, such as a perturbation of this batch, can be a plain tensor",
            stacklevel=stacklevel + 1,
        )


def check_movable(named: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
    """Check that parameters can move from the CPU to a device while they stay the same objects."""
    for name, parameter in named:
        if is_traceable_wrapper_subclass(parameter):
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__} on the CPU, which does not "
                f"move to another device in place; call model.to({str(device)!r}) first"
            )


def register_owner(
    named: Sequence[tuple[str, nn.Parameter]],
    owner: object,
    hooks: Sequence[Removable],
) -> Callable[[], object]:
    """Register `owner` as owner of the parameters until it is garbage-collected.

    Returns a function that ends the ownership earlier and removes the hooks.
    """
    reference = weakref.ref(owner)
    keys = [id(parameter) for _, parameter in named]
    for key in keys:
        _OWNERS[key] = reference

    def unregister() -> None:
        for hook in hooks:
            hook.remove()
        for key in keys:
            if _OWNERS.get(key) is reference:
                del _OWNERS[key]

    return weakref.finalize(owner, unregister)
