"""Poplar's plan, sampler and exact weights for torch's FSDP2 (`fully_shard`).

FSDP2 keeps parameters, gradients and optimizer, in even shares. The stage of the plan decides what
is sharded between the passes of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from poplar.integrations.unequal_passes import UnequalPasses as _UnequalPasses
from poplar.integrations.unequal_passes import autotune_for
from poplar.values.plan import Plan
from poplar.zero.micro_batch_loss import LossFunction

__all__ = ["UnequalPasses", "autotune"]


class UnequalPasses(_UnequalPasses):
    """The passes of a plan in a training loop with FSDP2.

        from poplar.integrations.fsdp2 import UnequalPasses, autotune

        plan = autotune(model, loss_fn, example, global_batch=64)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        passes = UnequalPasses(model, plan)

    The loop is that of `poplar.integrations.ddp.UnequalPasses`. After it, `.grad` holds the shards
    of the gradient of the mean loss over the global batch, so clipping, loss scalers, schedulers
    and DTensor checkpoints work as without Poplar. Backwards outside the loop are averaged over
    ranks, as FSDP2 does.

    | stage | between the passes of a step | collectives | passes |
    | --- | --- | --- | --- |
    | 1 | parameters and gradients are whole | once per step | differ by rank |
    | 2 | parameters are whole, gradients sharded | gradients in every pass | the same number |
    | 3 | everything is sharded, as with FSDP2's defaults | all in every pass | the same number |

    At stages 1 and 2, `set_reshard_after_forward(False)` is called. Between steps everything is
    sharded. In a pass in which a rank has no samples it runs one sample, which does not count.

    If the loop body raises on a rank, that rank raises its error and stops all ranks, because FSDP2
    is in the middle of a pass. The others raise `CollectiveTimeout` with its cause or, if they wait
    in a forward, torch's error of a closed connection. Start again from a checkpoint.

    Args:
        model: to which, and to whose blocks, `fully_shard` was applied, over a mesh of one
            dimension; possibly compiled.
        plan: of stage 1, 2 or 3, with even shares, for as many ranks as the mesh has.
        allow_forward_state, timeout: as for `poplar.integrations.ddp.UnequalPasses`, whose errors
            are raised, too.
    """

    stages = (1, 2, 3)
    engine = "FSDP2"

    def __init__(self, model: nn.Module, plan: Plan, **options: Any) -> None:
        super().__init__(model, plan, **options)
        if self._keeps_parameters:
            self._model.set_reshard_after_forward(False)

    @property
    def _keeps_parameters(self) -> bool:
        """Parameters stay unsharded from the first forward to the last backward of a step."""
        return self._plan.stage < 3

    def _process_group(self) -> dist.ProcessGroup:
        model: Any = self._model
        if not isinstance(model, FSDPModule):
            inner = any(isinstance(module, FSDPModule) for module in model.modules())
            what = "only modules of it are" if inner else "it is not"
            raise TypeError(
                f"the model is a {type(model).__name__}, and {what} sharded by FSDP2; call "
                "torch.distributed.fsdp.fully_shard(model) first"
            )
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward in evaluation leaves plain tensors
        sharded = [p for p in self._model.parameters() if isinstance(p, DTensor)]
        meshes = {parameter.device_mesh for parameter in sharded}
        if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
            raise ValueError(
                "the parameters of the model are on "
                f"{sorted(str(tuple(mesh.shape)) for mesh in meshes)}; FSDP2 with a plan needs one "
                "mesh of one dimension, without HSDP or tensor parallelism"
            )
        group: dist.ProcessGroup = meshes.pop().get_group()
        return group

    def _check_model(self) -> None:
        modules = (m for m in self._model.modules() if isinstance(m, FSDPModule))
        factors = set(chain.from_iterable(map(_divide_factors, modules)))
        factors -= {None, self._group.size}
        if factors:
            raise ValueError(
                f"set_gradient_divide_factor({factors.pop()!r}) was called, but the gradient of a "
                "plan is the mean over the global batch, for which FSDP2 has to divide by the "
                f"number of ranks; call set_gradient_divide_factor({self._group.size}) instead, "
                "for each module that is sharded"
            )

    @contextmanager
    def _pass(self, last: bool) -> Iterator[None]:
        # `autograd.grad` in the body leaves the gradients of earlier passes and the parameters,
        # which the backward of the loss may need again.
        with self._after_backwards(reduces=False, reshards=False, then=True):
            yield

    def _backward(self, last: bool) -> AbstractContextManager[None]:
        return self._after_backwards(
            reduces=last or self._plan.synchronizes_every_pass,
            reshards=last or not self._keeps_parameters,
            then=False,
        )

    @contextmanager
    def _after_backwards(self, *, reduces: bool, reshards: bool, then: bool) -> Iterator[None]:
        """A context in which FSDP2 does this after a backward; `then`: both, or neither."""
        model = self._model
        model.set_requires_gradient_sync(reduces)
        model.set_reshard_after_backward(reshards)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(then)
            model.set_reshard_after_backward(then)


def _divide_factors(module: FSDPModule) -> list[float | None]:
    """What gradients of a sharded module are divided by; None: by the number of ranks."""
    state: Any = module._get_fsdp_state()  # there is no public getter
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # until torch 2.12
        groups = filter(None, [state._fsdp_param_group])
    return [group.gradient_divide_factor for group in groups]


def autotune(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    stage: int = 3,
    **options: Any,
) -> Plan:
    """The fastest micro-batches and passes for FSDP2 on these ranks, in even shares. Collective.

    The predicted step is one of Poplar's own engine at this stage, which communicates as much.

    Args:
        model: before `fully_shard`: on this rank's device, or on `meta` if it fits on no device.
        loss_fn, example_batch, global_batch: as for `poplar.autotune`.
        stage: 1, 2 or 3: what stays sharded between passes; see `UnequalPasses`.
        options: further arguments of `poplar.autotune`, such as `optimizer_class`; without
            `communication` and `policy`, because FSDP2 sends the values and shards evenly.

    Raises:
        ValueError: the stage is another one, or an argument asks for what FSDP2 does not do.
    """
    options |= {"stage": stage, "global_batch": global_batch}
    return autotune_for(UnequalPasses, model, loss_fn, example_batch, **options)
