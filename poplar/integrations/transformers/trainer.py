"""`PoplarTrainerMixin`: replaces how `Trainer` feeds ranks, runs a step, and saves its state.

Private methods of `Trainer` that it overrides: `_clip_grad_norm`, `_get_grad_norm`,
`_track_num_input_tokens`, `_maybe_log_save_evaluate`, `_save_optimizer_and_scheduler`,
`_load_from_checkpoint`, `_load_optimizer_and_scheduler`. That it calls: `_get_num_items_in_batch`,
`_prepare_inputs`, `_get_dataloader`, `_get_train_sampler`, `_save`.
Attributes: `_train_batch_size`, `_globalstep_last_logged`, `_tr_loss`, `_loss_shifts_labels`,
`_gen_kwargs` (of `Seq2SeqTrainer`), `_metrics` and `_total_train_tokens` (of TRL).
Tested with transformers 5.23, accelerate 1.15 and trl 1.16.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import DynamoBackend
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import PreTrainedModel, Trainer
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from poplar.checkpoint.files.save_job import complete_name
from poplar.checkpoint.files.transfers import transfer_on_all_ranks
from poplar.checkpoint.frozen_base import base_of
from poplar.checkpoint.load import load_checkpoint
from poplar.checkpoint.save import save_now
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm import Control
from poplar.data import CollateMicroBatches, StreamSplit, pytree, split_stream
from poplar.data.lengths import padded_length
from poplar.data.micro_batch_collation import Collate, MicroBatches
from poplar.integrations.transformers.arguments import PoplarArguments
from poplar.integrations.transformers.batches import EpochLoader, EpochSampler
from poplar.integrations.transformers.checks import check_trainer
from poplar.integrations.transformers.loss import (
    PassMetrics,
    TrainerLoss,
    items_in,
    own_mean_weight,
    samples_of,
)
from poplar.integrations.transformers.optimizer import TrainerOptimizer
from poplar.integrations.transformers.what_counts import WhatCounts
from poplar.integrations.user_loader import kept_options
from poplar.monitoring import Logger, Monitor, Progress, RunFile
from poplar.tuning.autotune import Tuned, tune
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.collective_calls import new_group
from poplar.zero.engine import Engine
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.steps.step_result import StepResult
from poplar.zero.trained_buffers import take_trained_buffers
from poplar.zero.unit import find_blocks

FOLDER = "poplar"
"""In a checkpoint of the trainer: the state of training, as `poplar.save_checkpoint` writes it."""
RUN_FILE = "poplar_run.json"
"""In `output_dir`: the record of the run, for `poplar report`."""
STEPS_PER_REPORT = 1000
"""Steps whose results are kept at most, if logs are less frequent or switched off."""
FIRST_SAMPLES, EXAMPLE_SAMPLES = 64, 8
"""The longest 8 of the first 64 samples of the dataset are measured; larger batches repeat them."""

logger = logging.get_logger(__name__)

_T = TypeVar("_T")

_Base: Any = object  # a trainer class follows it in the list of base classes


class PoplarTrainerMixin(_Base):  # type: ignore[misc]
    """Trains with `HeteroZeroOptimizer`; goes before a trainer class in the list of base classes.

    `TrainingArguments` keep their meaning. The global batch is `per_device_train_batch_size x
    gradient_accumulation_steps x ranks`. The plan splits it, so a rank's micro-batches may be of
    any size, and `trainer.args` has the accumulation in `per_device_train_batch_size`.

    Args:
        *args: as for the trainer class.
        poplar: the options of Poplar.
        loggers: of `poplar.monitoring`, beside the reporters of `TrainingArguments`; they get the
            steps since the last log. The same on all ranks, used on rank 0.
        **kwargs: as for the trainer class.

    Raises:
        ValueError: arguments ask for something that Poplar does not support.
    """

    args: Any
    optimizer_cls_and_kwargs: Any
    _train_batch_size: Any
    _tr_loss: Any
    _gen_kwargs: Any

    def __init__(
        self,
        *args: Any,
        poplar: PoplarArguments | None = None,
        loggers: Sequence[Logger] = (),
        **kwargs: Any,
    ) -> None:
        self.poplar = PoplarArguments() if poplar is None else poplar
        self.tuned: Tuned | None = None
        """The profile and the trial runs behind the plan; None if the plan was given."""
        self._plan: Plan | None = None
        self._profile: ClusterProfile | None = None
        self._sampler: EpochSampler | StreamSplit[Any] | None = None
        self._lengths: list[int] | None = None
        """Of the samples of the dataset, if global batches are divided by them."""
        super().__init__(*args, **kwargs)
        self.args = _as_given(self.args)
        check_trainer(self, PoplarTrainerMixin)
        self.poplar = self.poplar.with_ddp_timeout(self.args)
        self._replaces_nonfinite = self.args.logging_nan_inf_filter
        self.args = _without_accumulation(self.args)
        self._train_batch_size = self.args.train_batch_size
        self.collate_train: Collate = self.data_collator
        self.pass_metrics = PassMetrics(self)
        own_weight = type(self).loss_weight is not PoplarTrainerMixin.loss_weight
        self.what_counts = WhatCounts(self, given=own_weight)
        self._scaler = GradScaler(self.args.device.type) if self.args.fp16 else None
        self._loggers = tuple(loggers)
        self._monitor: Monitor | None = None
        self._progress: Progress | None = None
        """The latest report of the monitor, if it is not logged yet."""

    @property
    def plan(self) -> Plan | None:
        """The plan, once training has begun; it changes if a rank runs out of memory."""
        optimizer = self._own_optimizer()
        return self._plan if optimizer is None else optimizer.plan

    @property
    def step_result(self) -> StepResult | None:
        """The outcome of the last step."""
        optimizer = self._own_optimizer()
        return None if optimizer is None else optimizer.result

    # Data.

    def get_train_dataloader(self) -> EpochLoader:
        """This rank's part of each global batch. Collective, since it needs the plan."""
        with new_group(None, self.poplar.wait_limit(), "get_train_dataloader()"):
            return self._planned_loader()

    def _planned_loader(self) -> EpochLoader:
        if self.train_dataset is None:
            raise ValueError("PoplarTrainer: training requires a train_dataset")
        given, sampler = self._on_all_ranks(
            self._loader_and_sampler, doing="reading the samples' lengths"
        )
        dataset: Any = given.dataset
        self.collate_train = given.collate_fn
        plan = self._make_plan(dataset)
        collate = CollateMicroBatches(self.collate_train, plan, self.args.process_index)
        options = kept_options(given) | {"collate_fn": collate}
        if isinstance(dataset, IterableDataset):
            self._sampler = split_stream(dataset, plan, drop_last=self.args.dataloader_drop_last)
            loader = EpochLoader(self._sampler, batch_size=None, **options)
            loader.source = dataset
            return loader
        self._sampler = EpochSampler(
            len(dataset),
            plan,
            self._order_of_epochs(len(dataset), sampler),
            drop_last=self.args.dataloader_drop_last,
            lengths=self._lengths,
        )
        return EpochLoader(dataset, batch_sampler=self._sampler, **options)

    def _loader_and_sampler(self) -> tuple[DataLoader[Any], Any]:
        """The loader and the sampler of `Trainer`, for one process; sets the lengths of samples."""
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset):
            groups = self.args.train_sampling_strategy == "group_by_length"
            if self.poplar.balance_lengths or groups:
                raise ValueError(
                    "PoplarTrainer does not support balance_lengths and train_sampling_strategy="
                    "'group_by_length' with an IterableDataset, whose lengths are not known before "
                    "it is read; leave them out, or pass a dataset with __len__"
                )
        alone = copy.copy(self)  # its accelerator would divide the loader among ranks
        alone.accelerator = SimpleNamespace(prepare=lambda loader: loader)
        loader = Trainer._get_dataloader(
            alone, dataset, "Training", self._train_batch_size, is_training=True
        )
        sampler = self._get_train_sampler(dataset)
        if isinstance(sampler, LengthGroupedSampler):
            self._lengths = list(sampler.lengths)
        elif self.poplar.balance_lengths:
            alone.args = copy.copy(self.args)
            alone.args.train_sampling_strategy = "group_by_length"
            by_length: Any = Trainer._get_train_sampler(alone, dataset)
            self._lengths = list(by_length.lengths)
        return loader, sampler

    def _order_of_epochs(self, length: int, sampler: Any) -> Callable[[int], Sequence[int]]:
        """The order in which `Trainer` would read the dataset, by epoch."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed

        def generator(epoch: int) -> torch.Generator:
            return torch.Generator("cpu").manual_seed(seed + epoch)

        if isinstance(sampler, SequentialSampler):
            return lambda _: range(length)
        if isinstance(sampler, RandomSampler):
            return lambda epoch: torch.randperm(
                length, generator=generator(epoch), device="cpu"
            ).tolist()
        if isinstance(sampler, LengthGroupedSampler):
            return lambda epoch: get_length_grouped_indices(  # type: ignore[no-untyped-call]
                sampler.lengths, self._global_batch(), generator=generator(epoch)
            )
        raise ValueError(
            f"PoplarTrainer does not support the sampler {type(sampler).__name__}: the order must "
            "be the same on all ranks; use train_sampling_strategy 'random', 'sequential' or "
            "'group_by_length', or sort the dataset"
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None
    ) -> tuple[list[Any], None]:
        """The next batch. `training_step` counts its items."""
        return list(islice(epoch_iterator, num_batches)), None

    # The plan.

    def _make_plan(self, dataset: Any) -> Plan:
        """The plan that was given, or the best one for this job. Collective."""
        self._prepare_model()
        if self._plan is not None:
            return cast(Plan, self.plan)
        global_batch = self._global_batch()
        self._plan, self._profile = self._on_all_ranks(
            lambda: self.poplar.given(global_batch, self.args.world_size),
            doing="reading the plan and the profile of PoplarArguments",
        )
        if self._plan is None:
            self.tuned = self._tune(dataset, global_batch)
            self._plan, self._profile = self.tuned.plan, self.tuned.profile
            logger.info(f"{self._plan}")
        self._plan.check_all_active("PoplarTrainer")
        return self._plan

    def _global_batch(self) -> int:
        return int(self.args.train_batch_size * self.args.world_size)

    def _on_all_ranks(self, work: Callable[[], _T], *, doing: str) -> _T:
        """The result of `work`; if it fails on one rank, all ranks raise. Collective."""
        with new_group(None, self.poplar.wait_limit(), doing) as group:
            return run_on_all_ranks(Control(group), work, doing=doing)

    def _prepare_model(self) -> None:
        """Autocast and placement as by `Trainer`, compiled blocks, and no DDP; once per model."""
        dynamo = self.accelerator.state.dynamo_plugin
        backend = dynamo.backend
        if backend != DynamoBackend.NO and not getattr(
            self.model, "_is_accelerate_prepared", False
        ):
            # Accelerate's graph of the whole model would contain the communication of its units.
            for name in find_blocks(self.model) or [""]:
                self.model.get_submodule(name).compile(**dynamo.to_kwargs())
            dynamo.backend = DynamoBackend.NO
        try:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        finally:
            dynamo.backend = backend

    def _tune(self, dataset: Any, global_batch: int) -> Tuned:
        example, lengths, about = self._on_all_ranks(
            lambda: self._example(dataset), doing="reading the first samples of the dataset"
        )
        optimizer_class, options = self._optimizer_class_and_options()
        settings = f"{self.args.label_smoothing_factor}, {self.accelerator.mixed_precision}"
        loss = TrainerLoss(self, f"{about}, {settings}")
        own = self.poplar.engine_options(self.model)
        own |= {"optimizer_class": optimizer_class, **self.poplar.tuning_options()}
        # Blocks that the model recomputes itself need not be recomputed by the plan.
        checkpointed = any(
            getattr(m, "gradient_checkpointing", False) for m in self.model.modules()
        )
        self.model.train()
        with self.pass_metrics.discarding():
            return tune(
                self.model,
                loss,
                example,
                lengths=lengths,
                global_batch=global_batch,
                loss="global_mean",  # no check of the weight, which changes no plan
                max_norm=self._max_norm(),
                profile=self._profile,
                recompute="never" if checkpointed else "auto",
                progress=not self.args.disable_tqdm,
                **own,
                **options,
            )

    def _example(self, dataset: Any) -> tuple[Any, Sequence[int] | None, str]:
        """What is measured, the lengths for which to plan (None: its own), and a text of both.

        Only a padded batch with a row per sample can be cut to other lengths, not a packed one.
        """
        features = sorted(_first(dataset, FIRST_SAMPLES), key=_length, reverse=True)
        batch = MicroBatches(features[:EXAMPLE_SAMPLES], (), self.collate_train)
        if self._lengths is not None:
            inputs = batch.take(range(len(batch)))
            if padded_length(inputs) and pytree.rows_are_samples(inputs, len(batch)):
                return self._prepare_inputs(inputs), self._lengths, "of given lengths"
        return batch, None, f"of {_length(features[0])} tokens"

    # The step.

    def create_optimizer(self, *args: Any, **kwargs: Any) -> TrainerOptimizer:
        """The optimizer, with the param groups of `Trainer`. Collective."""
        if self.optimizer is not None:
            return cast(TrainerOptimizer, self.optimizer)
        optimizer_class, options = self._optimizer_class_and_options()
        engine = self.poplar.engine_options(self.model) | {
            "plan": self._plan,
            "communicator": self.poplar.communicator,
            "on_out_of_memory": self.poplar.on_out_of_memory,
            "on_nonfinite": self.poplar.on_nonfinite,
        }
        given = self.optimizer_cls_and_kwargs
        self.optimizer_cls_and_kwargs = (
            TrainerOptimizer,
            {
                "owner": self.model,
                "optimizer_class": optimizer_class,
                "engine": engine,
                **options,
            },
        )
        try:
            made = super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = given
        if not isinstance(made, TrainerOptimizer):
            raise ValueError(
                f"{type(self).__name__} has made its own optimizer ({type(made).__name__}), which "
                "updates whole parameters; leave out the option that asks for it"
            )
        return made

    def _optimizer_class_and_options(self) -> tuple[Any, dict[str, Any]]:
        given = self.optimizer_cls_and_kwargs
        if given is None:
            given = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        return given[0], dict(given[1])

    def training_step(
        self, model: nn.Module, inputs: MicroBatches, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """All passes of a step, and its update. Collective.

        Returns:
            The loss of the global batch; equal on all ranks.
        """
        if self._monitor is None:
            self._monitor = self._start_monitor()
        self.model.train()
        self.what_counts.look(inputs)
        with self.pass_metrics.collecting():
            loss_fn = TrainerLoss(self)
            result = self.optimizer.train_step(
                loss_fn,
                inputs,
                weight=loss_fn.weight,
                loss="global_mean" if self.what_counts.name == "sum" else "mean",
                max_norm=self._max_norm(),
                scaler=self._scaler,
            )
        self._progress = self._monitor(result) or self._progress
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return self._logged_loss(result.loss_on_device)

    def _logged_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss in fp32; the mean since the last log for one that `Trainer` would filter.

        `Trainer` itself would wait for the device in every step to find such a loss.
        """
        loss = loss.to(self.args.device, torch.float32)
        if not self._replaces_nonfinite:
            return loss
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, self._tr_loss / steps)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As of the trainer class. A rank without samples evaluates with the trained buffers."""
        optimizer = self._own_optimizer()
        if optimizer is not None:
            take_trained_buffers(optimizer._training.engine, doing="the evaluation")
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As of the trainer class. Ranks that generate run equally many forwards at stage 3."""
        optimizer = self._own_optimizer()
        options: dict[str, Any] | None = getattr(self, "_gen_kwargs", None)
        if optimizer is not None and options is not None:
            sharded = optimizer._training_parts().engine.strategy.shards_parameters
            self._gen_kwargs = {"synced_gpus": sharded} | options
        return super().prediction_step(*args, **kwargs)

    def loss_weight(self, inputs: Any) -> float:
        """What the mean loss of a micro-batch counts: the items that `Trainer` counts, or samples.

        The first steps show which it is, or that the loss is a sum. Override it if `compute_loss`
        returns another mean.
        """
        if self.what_counts.name != "items":
            return samples_of(inputs)
        items = items_in(self, inputs)
        if items is not None:
            return float(items)
        return own_mean_weight(inputs, getattr(self, "_loss_shifts_labels", False))

    def _max_norm(self) -> float:
        """Without a limit the norm is logged all the same."""
        return self.args.max_grad_norm if self.args.max_grad_norm else float("inf")

    def _clip_grad_norm(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self._get_grad_norm()

    def _get_grad_norm(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """The norm before clipping, on the device; the step has clipped in its update."""
        return None if self.step_result is None else self.step_result.grad_norm_on_device

    def _own_optimizer(self) -> TrainerOptimizer | None:
        optimizer = getattr(self, "optimizer", None)
        return optimizer if isinstance(optimizer, TrainerOptimizer) else None

    # Counts and logs.

    def floating_point_ops(self, inputs: Any) -> int:
        return cast(int, super().floating_point_ops(self._values_of(inputs)))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(self._values_of(inputs))

    def _values_of(self, inputs: Any) -> Any:
        """What counting reads of this rank's batch, of all micro-batches together.

        `Trainer` finds values by name, so it counts none in tuples and lists.
        """
        if not isinstance(inputs, MicroBatches):
            return inputs
        main = getattr(self.model, "main_input_name", "input_ids")
        values = {main: [torch.zeros(0, dtype=torch.int64, device="cpu")], "attention_mask": []}
        for part in inputs.parts():
            names = part.keys() if isinstance(part, Mapping) else ()
            for name in values.keys() & names:
                values[name].append(part[name].reshape(-1))
        return {name: torch.cat(parts) for name, parts in values.items() if parts}

    def _start_monitor(self) -> Monitor:
        """Reports speeds and waits to the loggers, and with every log of losses. Collective."""
        if self._sampler is not None and not self.args.ignore_data_skip:
            # `Trainer` has drawn and dropped the batches of the epoch before a checkpoint.
            is_stream = isinstance(self._sampler, StreamSplit)  # an epoch of which is all steps
            steps = self.state.max_steps if is_stream else len(cast(EpochSampler, self._sampler))
            self._sampler.skip(self.state.global_step % steps)
        if self._profile is not None and self.poplar.replan != "off":
            self.optimizer.follow_drift(
                self._profile,
                replan=self.poplar.replan,
                steps=self.state.max_steps - self.state.global_step,
                leave_out="never",
            )
        loggers = list(self._loggers)
        if self._profile is not None and self.poplar.run_record:
            path = Path(self.args.output_dir) / RUN_FILE
            loggers.append(RunFile(path, self.args.run_name or type(self.model).__name__))
        return Monitor(
            self.optimizer,
            loggers,
            every=max(STEPS_PER_REPORT, self.state.logging_steps),
            start_step=self.state.global_step,
            profile=self._profile,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As of the trainer class. Collective."""
        self._monitor = self._progress = None
        output = super().train(*args, **kwargs)
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values; with a loss, also the latest speeds and waits of the monitor."""
        if self._progress is not None and "loss" in logs:
            logs |= {name: v for name, v in self._progress.scalars().items() if name not in logs}
            self._progress = None
        super().log(logs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self.pass_metrics.merge()
            if self._monitor is not None:
                self._progress = self._monitor.report() or self._progress
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As of the trainer class. Collective."""
        self.pass_metrics.merge_tokens()
        return super().evaluate(*args, **kwargs)

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`. Collective."""
        optimizer = self._own_optimizer()
        if optimizer is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        engine = optimizer._training_parts().engine
        sharded = engine.strategy.shards_parameters
        doing = f"save_model({str(folder)!r})"
        take_trained_buffers(engine, doing=doing)

        def save(state: dict[str, Any] | None = None) -> None:
            """On one rank; the others wait as long as it writes."""

            def write() -> None:
                if self.args.should_save:
                    self._save(folder, state_dict=state)

            transfer_on_all_ranks(optimizer.control, self.args.device, write, doing=doing)

        # A `PreTrainedModel` has adapters, too, after `model.add_adapter`.
        if sharded and getattr(self.model, "peft_config", None):
            # The base stays sharded: maybe no rank could hold it.
            adapters = _adapter_values(engine)
            # PEFT runs the forward of prompt encoders to save what it returns.
            own = self.model._modules.get("prompt_encoder")
            encoders = list(own.values()) if isinstance(own, nn.ModuleDict) else []
            with _without_quantizer(self.model), optimizer.full_parameters(modules=encoders):
                save(adapters)
        elif sharded and isinstance(self.model, PreTrainedModel):
            save({})
            # Every rank sends its part, so no rank holds the whole model.
            optimizer.save_model(Path(folder) / SAFE_WEIGHTS_NAME)
            if self.args.should_save and _has_other_names_on_disk(self.model):
                logger.warning_once(
                    f"stage 3 saves the weights of {type(self.model).__name__} with their names "
                    "in memory, not those of the hub: see docs/guides/transformers.md"
                )
        else:
            with optimizer.full_parameters():
                save()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its part of the state of training. Collective."""
        folder = Path(output_dir) / FOLDER
        save_now(folder, self.optimizer, state=self._state(), replaces=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        self._on_all_ranks(
            lambda: super(PoplarTrainerMixin, self)._load_from_checkpoint(
                resume_from_checkpoint, *args, **kwargs
            ),
            doing=f"loading the model of {str(resume_from_checkpoint)!r}",
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what `_save_optimizer_and_scheduler`, or `Trainer`, has saved. Collective."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        found = [
            name for name in (FOLDER, "optimizer.pt") if complete_name(folder / name).exists()
        ][:1]
        by_rank = self.optimizer.control.exchange_objects(found, what="resume_from_checkpoint")
        if any(other != by_rank[0] for other in by_rank):
            raise ValueError(
                f"the ranks see different files in {checkpoint!r}: {by_rank}; checkpoints must be "
                "in a folder that all ranks see"
            )
        if found == [FOLDER]:
            load_checkpoint(folder / FOLDER, self.optimizer, state=self._state())
        elif found:
            states: list[Any] = []

            def read() -> None:
                files = (_loaded(folder / name) for name in ("optimizer.pt", "scheduler.pt"))
                states.extend(self.optimizer.states_of_trainer(*files))

            doing = f"reading the state of the optimizer in {checkpoint!r}"
            transfer_on_all_ranks(self.optimizer.control, self.args.device, read, doing=doing)
            self.optimizer.load_state_dict(states[0])
            self.lr_scheduler.load_state_dict(states[1])
        else:
            logger.warning(
                f"{checkpoint} has no state of an optimizer (save_only_model=True?): training goes "
                "on with a new optimizer and schedule"
            )

    def _state(self) -> dict[str, Any]:
        scaler = {} if self._scaler is None else {"scaler": self._scaler}
        return {"scheduler": self.lr_scheduler, **scaler}

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Not supported: a plan belongs to one model and batch size."""
        raise ValueError(
            "PoplarTrainer does not support hyperparameter_search; start one run per trial"
        )


class PoplarTrainer(PoplarTrainerMixin, Trainer):  # type: ignore[misc]
    """`Trainer` on unequal devices; see `PoplarTrainerMixin`."""


def _without_accumulation(args: Any) -> Any:
    """A copy of `TrainingArguments` for a loop in which a step is one batch of the loader.

    Tokens are counted over all ranks by the weights of the passes, and losses that are not finite
    are filtered on the device, not by `Trainer`.
    """
    args = copy.copy(args)
    args.per_device_train_batch_size *= args.gradient_accumulation_steps
    args.gradient_accumulation_steps = 1
    replacements = {"average_tokens_across_devices": False, "logging_nan_inf_filter": False}
    args._poplar_replaced = {name: getattr(args, name) for name in replacements}
    vars(args).update(replacements)
    return args


def _as_given(args: Any) -> Any:
    """A copy of `TrainingArguments`; if they are of a `PoplarTrainer`, as that was given them."""
    args = copy.copy(args)
    vars(args).update(vars(args).pop("_poplar_replaced", {}))
    return args


def _first(dataset: Any, count: int) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        return islice(iter(dataset), count)
    return (dataset[at] for at in range(min(count, len(dataset))))


def _length(features: Any) -> int:
    """Of the longest value of a sample."""
    values = features.values() if hasattr(features, "values") else [features]
    # 0-d tensors and arrays have `__len__`, which raises.
    counted = (v for v in values if hasattr(v, "__len__") and getattr(v, "ndim", 1) > 0)
    return max(map(len, counted), default=0)


def _adapter_values(engine: Engine) -> dict[str, Any]:
    """The state dict without the frozen base, and with whole values. Collective."""
    with engine.values.naming_parameters():
        base = base_of(engine, engine.model.state_dict(keep_vars=True))
    return {
        name: value.full_tensor() if isinstance(value, ShardTensor) else value
        for name, value in engine.model.state_dict().items()
        if name not in base
    }


@contextlib.contextmanager
def _without_quantizer(model: nn.Module) -> Iterator[None]:
    """`save_pretrained` would let it replace the given state dict by that of the sharded model."""
    quantizer = vars(model).pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            vars(model)["hf_quantizer"] = quantizer


def _has_other_names_on_disk(model: PreTrainedModel) -> bool:
    """Whether `save_pretrained` renames, splits or merges weights, such as those of experts."""
    weights = {
        name: torch.empty(parameter.shape, device="meta")
        for name, parameter in model.named_parameters()
    }
    return set(revert_weight_conversion(model, dict(weights))) != set(weights)


def _loaded(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
