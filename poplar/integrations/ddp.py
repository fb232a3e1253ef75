"""Poplar's plan, sampler and exact weights for torch's `DistributedDataParallel`.

DDP keeps parameters, gradients and optimizer. Every rank runs its own number of passes, and
gradients are all-reduced in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from poplar.integrations.unequal_passes import UnequalPasses as _UnequalPasses
from poplar.integrations.unequal_passes import autotune_for
from poplar.values.plan import Plan
from poplar.zero.micro_batch_loss import LossFunction

__all__ = ["UnequalPasses", "autotune"]


class UnequalPasses(_UnequalPasses):
    """The passes of a plan in a training loop with `DistributedDataParallel`.

        from poplar.integrations.ddp import UnequalPasses, autotune

        plan = autotune(model, loss_fn, example, global_batch=64)
        model = DistributedDataParallel(model)
        passes = UnequalPasses(model, plan)
        for batch in loader:                                    # with a HeteroBatchSampler
            for micro_batch in passes(batch, weight=poplar.tokens()):
                passes.backward(loss_fn(model, micro_batch))
            optimizer.step()
            optimizer.zero_grad()

    After the loop, `.grad` is the gradient of the mean loss over the global batch on every rank, so
    clipping, loss scalers, schedulers and checkpoints work as without Poplar. Backwards outside the
    loop are averaged over ranks, as DDP does.

    If the loop body raises on a rank, that rank raises its error, and the others raise `RankFailed`
    from their last `backward`. The step is dropped on all ranks, and training may continue: the
    rank that failed takes part in the all-reduces with zeros, as in DDP's own `Join`. An error
    inside the last backward of a step stops all ranks: the others raise `CollectiveTimeout` with
    its cause.

    Compute losses in fp32: the weight is a factor of the loss, and 16 bits round it. A warning says
    so.

    Args:
        model: a `DistributedDataParallel`, possibly compiled. `find_unused_parameters`,
            `gradient_as_bucket_view` and communication hooks work; `static_graph` does not.
        plan: of stage 0, for as many ranks as DDP has.
        allow_forward_state: accept buffers and frozen parameters that forwards write and that
            differ between ranks, as the statistics of BatchNorm in training mode do: they are those
            of a micro-batch. It also accepts BatchNorm without running statistics. SyncBatchNorm in
            training mode is always an error.
        timeout: how long a rank waits for other ranks before a backward; default: 5 minutes.

    Raises:
        ValueError, TypeError: the model or the plan is wrong, or ranks have different plans.
        RankFailed: an argument of another rank is wrong.
    """

    stages = (0,)
    engine = "DDP"

    def _process_group(self) -> dist.ProcessGroup:
        model = self._model
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"the model is a {type(model).__name__}; wrap it first: model = "
                "torch.nn.parallel.DistributedDataParallel(model)"
            )
        group: dist.ProcessGroup = model.process_group
        return group

    def _check_model(self) -> None:
        model = self._model
        modules = model.module.named_modules()
        inner = [name for name, m in modules if isinstance(m, DistributedDataParallel)]
        if inner:
            raise TypeError(
                f"module {inner[0] or 'module'!r} of the DDP model is wrapped a second time; wrap "
                "the model once"
            )
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
            raise ValueError(
                "an optimizer runs in the backward of the DDP model, before ranks know whether all "
                "of them have a gradient; call its step() after the loop"
            )
        if model.static_graph:
            raise ValueError(
                "static_graph=True fails if ranks run different numbers of passes; build "
                "DistributedDataParallel without it"
            )

    def _inner_model(self) -> nn.Module:
        inner: nn.Module = self._model.module
        return inner

    def _stand_in(self) -> Callable[[bool], None]:
        return partial(reduce_zeros, self._model)

    def _forget_step(self) -> None:
        # A forward without its backward, or buckets that only some ranks will rebuild.
        self._model.reducer._reset_state()

    @contextmanager
    def _pass(self, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self._model.no_sync():
                yield


def autotune(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    **options: Any,
) -> Plan:
    """The fastest micro-batches and passes for DDP on these ranks. Collective.

    The predicted step is one of Poplar's stage 0, whose reduce-scatter and all-gather stand for
    DDP's all-reduce.

    Args:
        model: on this rank's device, before it is wrapped.
        loss_fn, example_batch, global_batch: as for `poplar.autotune`.
        options: further arguments of `poplar.autotune`, such as `optimizer_class`; without
            `communication` and `policy`, because DDP sends the gradients and shards nothing.
    """
    options = {"stage": 0, "global_batch": global_batch, **options}
    return autotune_for(UnequalPasses, model, loss_fn, example_batch, **options)


def reduce_zeros(model: DistributedDataParallel, was_called: bool) -> None:
    """Take part in the communication of a step with a gradient of zeros, in the order of DDP.

    The collectives are those of `Join`, for a rank that has no more batches. Here the others learn
    of it when ranks agree after the backward.

    Args:
        model: with a step that has not come to its last backward on this rank.
        was_called: whether the model was called in this step.
    """
    if not was_called:
        model.reducer._rebuild_buckets()
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers()
    model.require_forward_param_sync = True  # as after a forward that is reduced
    model._match_all_reduce_for_bwd_pass()
    if model.find_unused_parameters:
        model._match_unused_params_allreduce()
