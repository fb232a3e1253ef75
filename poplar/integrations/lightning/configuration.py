"""What the Trainer and the LightningModule configure: checked, and rebuilt for `PoplarStrategy`.

The precision plugins clip through the optimizer, which holds the sharded gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from poplar.optimizer import HeteroZeroOptimizer


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
    if trainer._accelerator_connector._layer_sync is not None:
        raise ValueError(
            "PoplarStrategy does not support sync batchnorm, for which all ranks would have to run "
            "equally many passes; drop Trainer(sync_batchnorm=True), and freeze BatchNorm layers "
            "with .eval(), or use GroupNorm or LayerNorm"
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


@dataclass(frozen=True)
class OptimizerRecipe:
    """The class, options and param groups of a plain optimizer."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Those that differ from the defaults of the class."""
    groups: list[dict[str, Any]]
    """With the options that differ from `options`."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerRecipe:
        """The recipe of an optimizer that has not stepped."""
        known = inspect.signature(type(optimizer).__init__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        defaults = optimizer.defaults
        options = {
            name: value
            for name, value in defaults.items()
            if (name in known and value != known[name].default) or (takes_any and name not in known)
        }
        kept = _kept_options(optimizer)
        options |= {
            name: kept[name]
            for name in known.keys() & kept.keys() - defaults.keys()
            if kept[name] != known[name].default
        }
        groups = [
            {
                name: value
                for name, value in group.items()
                if name != "param_names" and not (name in defaults and value == defaults[name])
            }
            for group in optimizer.param_groups
        ]
        return OptimizerRecipe(type(optimizer), options, groups)


def _kept_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Options that a class keeps as attributes, as torchao does, or in `args`, as bitsandbytes."""
    args = dict(vars(optimizer.args)) if hasattr(optimizer, "args") else {}
    if type(optimizer).__name__.endswith("bit"):  # which does not take its own number
        args.pop("optim_bits", None)
    return {**args, **{key: value for key, value in vars(optimizer).items() if key != "args"}}


def check_configured(optimizers: Iterable[Any]) -> torch.optim.Optimizer:
    """The one optimizer that `configure_optimizers` returned.

    Raises:
        TypeError, ValueError: it returned none, several, or one that is not plain.
    """
    found = list(optimizers)
    if len(found) != 1 or not isinstance(found[0], torch.optim.Optimizer):
        names = [type(optimizer).__name__ for optimizer in found]
        raise ValueError(
            f"PoplarStrategy needs one optimizer from configure_optimizers(), got {names}; use "
            "param groups for different hyper-parameters"
        )
    if isinstance(found[0], HeteroZeroOptimizer):
        raise TypeError(
            "configure_optimizers() returned a HeteroZeroOptimizer; return the plain optimizer, "
            "AdamW(self.parameters(), ...): PoplarStrategy builds the HeteroZeroOptimizer from it"
        )
    return found[0]


def attach(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a scheduler of a plain optimizer write to another one with the same param groups.

    Raises:
        TypeError: it has no `optimizer`.
    """
    if not hasattr(scheduler, "optimizer"):
        raise TypeError(
            f"scheduler {type(scheduler).__name__} has no attribute `optimizer`, so it cannot "
            "follow the optimizer that PoplarStrategy builds; use a torch.optim.lr_scheduler"
        )
    scheduler.optimizer = optimizer
    for nested in getattr(scheduler, "_schedulers", ()):
        attach(nested, optimizer)


class StepCounter(LRScheduler):
    """Changes nothing. As every scheduler, it lets `optimizer.step` count its calls.

    Other schedulers that were built for another optimizer warn if it does not.
    """

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


class _ClipsSharded(Precision):
    """`precision="32-true"`. Clips through `HeteroZeroOptimizer.clip_grad_norm_`."""

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ValueError(
                "PoplarStrategy clips gradients by norm only, got "
                f"gradient_clip_algorithm={str(gradient_clip_algorithm)!r}; use 'norm'"
            )
        sharded: HeteroZeroOptimizer = optimizer
        sharded.clip_grad_norm_(float(clip_val))


class AutocastPrecision(_ClipsSharded, MixedPrecision):
    """`precision="bf16-mixed"`: fp32 parameters, forward under autocast."""


def supported(plugin: Precision | None) -> Precision:
    """The plugin that replaces one of Lightning's.

    Raises:
        ValueError: a precision that `PoplarStrategy` does not support.
    """
    if plugin is None or type(plugin) is Precision:
        return _ClipsSharded()
    if isinstance(plugin, _ClipsSharded):
        return plugin
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return AutocastPrecision("bf16-mixed", plugin.device)
    raise ValueError(
        f"PoplarStrategy supports precision='32-true' and 'bf16-mixed', got {plugin.precision!r} "
        f"({type(plugin).__name__}); for parameters that compute in bf16 or fp16 over fp32 master "
        "values, use '32-true' and PoplarStrategy(compute_dtype=torch.bfloat16)"
    )
