"""What a Trainer and a LightningModule must be so that a step can run in passes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor


def check_trainer(trainer: Any, module: pl.LightningModule) -> None:
    """Reject what would train on another gradient than the user expects.

    Raises:
        ValueError: names it, and what to use instead.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "PoplarStrategy does not support manual optimization, because it runs training_step "
            "once per pass; use automatic optimization, or a loop of your own with "
            "HeteroZeroOptimizer.micro_batches"
        )
    if module._compiler_ctx is not None:
        raise ValueError(
            "PoplarStrategy does not support torch.compile(module), whose graph would contain the "
            "communication of its units; compile the blocks: `for block in module.layers: "
            "block.compile()`"
        )
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") != "norm":
        raise ValueError(
            "PoplarStrategy clips gradients by norm only; use gradient_clip_algorithm='norm'"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            "PoplarStrategy splits batches into passes, so training_step must take a batch, not a "
            "dataloader_iter"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            raise ValueError(
                f"PoplarStrategy does not support {type(callback).__name__}: the plan has one "
                "global batch, and the parameters may be sharded; remove the callback"
            )
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"PoplarStrategy does not support {type(callback).__name__}, which adds parameters "
                "to the optimizer during training; train all parameters, or freeze some with "
                "requires_grad_(False) for the whole fit"
            )


def check_stage(trainer: Any, stage: int) -> None:
    """Reject callbacks that read and write parameters between steps, where they are sharded.

    Raises:
        ValueError: names the callback, and what to use instead.
    """
    for callback in trainer.callbacks:
        if stage == 3 and isinstance(callback, WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} reads and writes parameters between steps, but at "
                "stage 3 they are sharded; use PoplarStrategy(stage=2), or a plan of stage 0 to 2"
            )


_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_batch_hooks(module: pl.LightningModule) -> None:
    """Reject hooks of whole batches, for training with micro-batches of their own lengths.

    Raises:
        ValueError: names them, and what to use instead.
    """
    found = [name for name in _BATCH_HOOKS if is_overridden(name, module)]
    if found:
        raise ValueError(
            f"PoplarStrategy(lengths=...) does not support {', '.join(found)} of the module, "
            "because micro-batches have tensors of different lengths; put what they do into the "
            "collate_fn of the loader or into training_step"
        )


def batch_index(module: pl.LightningModule, index: int) -> tuple[int, ...]:
    """The arguments of `training_step` after the batch, if it is batch `index`."""
    return (index,) if len(inspect.signature(module.training_step).parameters) > 1 else ()


def loss_of(output: Any) -> Tensor:
    """The loss in what `training_step` returned.

    Raises:
        TypeError: it returned none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            "training_step must return its loss, or a dict with 'loss', in every pass, got "
            f"{type(output).__name__}"
        )
    return loss
