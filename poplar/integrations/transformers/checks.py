"""What of `TrainingArguments` and of a trainer Poplar does not support: refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from poplar.integrations.versions import check_version

OPTIMIZERS = (
    *("adagrad", "adamw_torch", "adamw_torch_fused", "rmsprop", "sgd", "adafactor"),
    *("adamw_torch_4bit", "adamw_torch_8bit", "adamw_8bit", "adamw_bnb_8bit", "lion_8bit"),
    *("rmsprop_bnb_8bit", "ademamix_8bit", "paged_adamw_8bit", "paged_lion_8bit"),
    *("paged_ademamix_8bit", "lion_32bit", "rmsprop_bnb_32bit", "paged_adamw_32bit"),
    *("paged_lion_32bit", "rmsprop_bnb", "ademamix", "paged_ademamix_32bit"),
)
"""Values of `optim` that name a class whose state can be divided among ranks."""
OWNED_METHODS = (
    "create_optimizer",
    "get_batch_samples",
    "get_train_dataloader",
    "training_step",
    "_get_train_sampler",
    "_prepare_inputs",
)
"""Methods that the mixin replaces or relies on."""
KNOWN_CLASSES = (
    "transformers.Trainer",
    "transformers.Seq2SeqTrainer",
    "trl.SFTTrainer",
    "trl._BaseTrainer",
    "trl.BaseTrainer",
    "llamafactory.CustomSeq2SeqTrainer",
    "llamafactory.CustomTrainer",
    "axolotl.AxolotlTrainer",
    "axolotl.OptimizerMixin",
    "axolotl.ActivationOffloadingMixin",
    "axolotl.LayerOffloadingMixin",
)
"""Package and class of trainers whose own versions of these methods are known to be replaceable."""


def check_trainer(trainer: Any, mixin: type) -> None:
    """Check that a trainer can do what its class and arguments ask for.

    Raises:
        ValueError: it cannot; names every problem and what to use instead.
        ImportError: it is one of an unsupported version of TRL.
    """
    if any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__):
        check_version("trl")
    problems = [*_of_arguments(trainer.args), *_of_class(type(trainer), mixin)]
    problems += _of_trainer(trainer)
    if problems:
        raise ValueError("PoplarTrainer does not support " + "; and not ".join(problems))


def _of_arguments(args: Any) -> Iterator[str]:
    if not (dist.is_available() and dist.is_initialized()):
        yield (
            "a script without process group: launch it with torchrun, as "
            "`torchrun --nproc-per-node 2 script.py`"
        )
    elif args.world_size != dist.get_world_size():
        yield (
            f"TrainingArguments that count {args.world_size} process of {dist.get_world_size()}: "
            "on ranks without GPU pass use_cpu=True"
        )
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config=...: only data parallelism; leave it out"
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True: leave it out, Poplar plans each rank's micro-batches and "
            "makes them smaller when a rank runs out of memory"
        )
    for name in sorted(vars(args)):
        # Unused parameters are found anyway. LLaMA-Factory sets this one by itself.
        harmless = name in ("ddp_backend", "ddp_timeout", "ddp_find_unused_parameters")
        if name.startswith("ddp_") and not harmless and getattr(args, name) is not None:
            yield f"{name}=...: there is no DistributedDataParallel; leave it out"
    if str(getattr(args.optim, "value", args.optim)) not in OPTIMIZERS:
        yield (
            f"optim={str(getattr(args.optim, 'value', args.optim))!r}: use one of "
            f"{', '.join(OPTIMIZERS)}, or optimizer_cls_and_kwargs=(an optimizer class, {...})"
        )
    if not args.average_tokens_across_devices and args.world_size > 1:
        yield (
            "average_tokens_across_devices=False: it would weight ranks equally, whatever their "
            "tokens; leave it out"
        )
    if args.fp16_full_eval or args.bf16_full_eval:
        yield (
            "fp16_full_eval and bf16_full_eval, which cast the parameters: use bf16=True or "
            "fp16=True (autocast)"
        )
    if args.save_on_each_node:
        yield "save_on_each_node=True: checkpoints need an output_dir that all ranks see"
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        yield "train_sampling_strategy='batch_rebalance': the plan balances ranks; leave it out"
    if not getattr(args, "dataloader_in_order", True):
        yield (
            "dataloader_in_order=False: ranks would train on parts of different global batches; "
            "leave it out"
        )
    for name in ("activation_offloading", "layer_offloading"):
        if getattr(args, name, False):
            yield f"{name}={getattr(args, name)}: use gradient_checkpointing, or stage 3"
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            yield f"accelerator_config {name}=True: every rank reads its own samples; leave it out"


def _of_trainer(trainer: Any) -> Iterator[str]:
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        yield (
            "optimizers=(...), which were built for other parameters: use "
            "optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), and lr_scheduler_type of "
            "TrainingArguments"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        yield (
            "DeepSpeed and FSDP: leave out deepspeed= and fsdp=, PoplarArguments(stage=...) is "
            "ZeRO, and launch with torchrun"
        )
    if trainer.is_model_parallel:
        yield "a model on several devices (device_map): load it without device_map"
    if (getattr(trainer.model, "_tp_size", None) or 1) > 1 or getattr(
        trainer, "is_distributed_loading_by_transformers", False
    ):
        yield "a model that from_pretrained has sharded: load it without tp_plan"


def _of_class(trainer_class: type, mixin: type) -> Iterator[str]:
    """Methods of classes behind the mixin that it would replace without a word."""
    bases = trainer_class.__mro__
    behind = bases[bases.index(mixin) + 1 :]
    for name in OWNED_METHODS:
        owner = next((cls for cls in behind if name in vars(cls)), None)
        if owner is None:
            continue
        if f"{owner.__module__.partition('.')[0]}.{owner.__name__}" not in KNOWN_CLASSES:
            yield (
                f"{owner.__name__}.{name}, which it would replace: put what it does into "
                "compute_loss, the data collator or a callback, or override it in a class in front "
                "of the mixin"
            )
