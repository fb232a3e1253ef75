"""`PoplarStrategy`: trains a LightningModule with a `HeteroZeroOptimizer`.

One batch of the training loader is this rank's part of a global batch. `training_step` runs in
passes over it, inside the closure that Lightning gives to `optimizer.step`, so hooks, callbacks,
schedulers and gradient clipping keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from poplar.checkpoint.files.save_job import complete_name
from poplar.comm.deadline import WATCHDOG_MARGIN
from poplar.integrations.exact_values import exact_values
from poplar.integrations.lightning import batches, checkpoints
from poplar.integrations.lightning.configuration import (
    AutocastPrecision,
    OptimizerRecipe,
    StepCounter,
    attach,
    batch_index,
    check_batch_hooks,
    check_configured,
    check_stage,
    check_trainer,
    loss_of,
    supported,
)
from poplar.integrations.lightning.logged_values import (
    EvaluationConnector,
    EvaluationLog,
    PassLog,
    RunningStep,
    discarding,
)
from poplar.integrations.own_dtype import own_dtype
from poplar.optimizer import HeteroZeroOptimizer
from poplar.system.devices import describe
from poplar.tuning.autotune import OPTIONS, tune
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile
from poplar.zero.micro_batches import counted
from poplar.zero.optimizers.granularity import Granularity
from poplar.zero.steps.nonfinite import OnNonFinite
from poplar.zero.steps.step_result import StepResult
from poplar.zero.trained_buffers import take_trained_buffers


class PoplarStrategy(DDPStrategy):
    """Trains on unequal devices with the gradient of one device.

        trainer = Trainer(strategy=PoplarStrategy(stage=2), devices=4, accumulate_grad_batches=8)

    The global batch is the loader's `batch_size` x `accumulate_grad_batches` x devices. The plan
    splits it, so one batch of the loop is one optimizer step: `max_steps`, `val_check_interval`,
    `limit_train_batches` and `log_every_n_steps` count steps. Values that `training_step` logs are
    means over the global batch, those that `validation_step` and `test_step` log over the dataset.

    At stage 3 parameters stay sharded after `fit`; read them inside
    `trainer.strategy.optimizer.full_parameters()`, or save them with `trainer.save_checkpoint`.

    Args:
        plan: a plan, or the path of its JSON file. None: `poplar.autotune` when training starts.
        stage: without a plan, the ZeRO stage, or "auto" for the fastest one that fits.
        weight: `weight(micro_batch)`, if the loss is not a mean over samples, for example the
            number of tokens that count.
        memory_limit: as for `poplar.autotune`.
        compute_dtype: dtype of the parameters in forward and backward, over fp32 master values;
            None: as they are.
        lengths: of the samples of the training dataset, as for `HeteroBatchSampler` and
            `poplar.autotune`. Each micro-batch is then collated on its own.
        reduce_dtype, units, communicator, allow_forward_state, granularity, on_nonfinite, timeout:
            as for `HeteroZeroOptimizer`.
        replan: as for `HeteroZeroOptimizer.follow_drift`; not with `plan`. The loader follows.
        process_group_backend: for `init_process_group`; None: by the device.
        tuning: further keyword arguments of `poplar.autotune`, such as `seconds` and `cache`.
    """

    strategy_name = "poplar"

    def __init__(
        self,
        *,
        plan: Plan | str | Path | None = None,
        stage: int | Literal["auto"] = "auto",
        weight: Callable[[Any], Any] | None = None,
        memory_limit: Any = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        lengths: batches.Lengths = None,
        units: Any = None,
        communicator: Any = "auto",
        allow_forward_state: bool = False,
        granularity: Granularity | None = None,
        on_nonfinite: OnNonFinite = "raise",
        timeout: timedelta | None = None,
        replan: Literal["auto", "advise", "off"] = "off",
        process_group_backend: str | None = None,
        **tuning: Any,
    ) -> None:
        group: dict[str, Any] = {"process_group_backend": process_group_backend}
        if timeout is not None:
            group["timeout"] = timeout + WATCHDOG_MARGIN
        super().__init__(**group)
        if unknown := tuning.keys() - OPTIONS:
            raise TypeError(
                f"PoplarStrategy got unknown arguments {sorted(unknown)}; besides its own it takes "
                "those of poplar.autotune"
            )
        if plan is not None and (stage != "auto" or tuning or memory_limit is not None):
            raise ValueError(
                "PoplarStrategy(plan=...) has a stage and needs no profile; drop stage=, "
                "memory_limit= and the arguments of autotune, or drop plan="
            )
        if plan is not None and replan != "off":
            raise ValueError(
                f"PoplarStrategy(replan={replan!r}) compares steps with a profile, which plan= "
                "does not have; drop plan=, or call strategy.optimizer.follow_drift(profile)"
            )
        self._replan = replan
        self._given_plan = plan if plan is None or isinstance(plan, Plan) else Plan.from_json(plan)
        self._engine_options = {
            "units": units,
            "communicator": communicator,
            "reduce_dtype": reduce_dtype,
            "allow_forward_state": allow_forward_state,
            "granularity": granularity,
            "on_nonfinite": on_nonfinite,
        }
        of_both = {name: value for name, value in self._engine_options.items() if name in OPTIONS}
        # The loop of Lightning needs samples on every rank.
        given = {"stage": stage, "memory_limit": memory_limit, "leave_out": "never"}
        self._tuning = {**of_both, **given, **tuning}
        self._weight = weight
        self._lengths = lengths
        self._waits = timeout
        self._compute_dtype = compute_dtype
        self._optimizer: HeteroZeroOptimizer | None = None
        self._owned: pl.LightningModule | None = None
        self._plan: Plan | None = None
        self._accumulated = 1
        """The user's `accumulate_grad_batches`; the plan's passes replace it."""
        self._train_loader: Any = None
        """As the user has built it."""
        self._step: RunningStep | None = None
        self._result: StepResult | None = None
        self._profile: ClusterProfile | None = None
        self._loaded_folder = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="ZeRO on unequal devices (Poplar)"
        )

    # Properties.

    @property
    def optimizer(self) -> HeteroZeroOptimizer:
        """The optimizer of the current or last `fit`."""
        if self._optimizer is None:
            raise RuntimeError("PoplarStrategy has an optimizer once Trainer.fit has set it up")
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The current plan."""
        plan = self.optimizer.plan
        assert plan is not None
        return plan

    @property
    def profile(self) -> ClusterProfile | None:
        """The profile that the plan was made from; None if the plan was given."""
        return self._profile

    @property
    def last_result(self) -> StepResult:
        """The result of the last step, for `poplar.monitoring.Monitor`."""
        if self._result is None:
            raise RuntimeError("PoplarStrategy has a result once a step has ended")
        return self._result

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._loaded_folder

    @property
    def precision_plugin(self) -> Precision:
        return supported(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else supported(precision_plugin)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # Setup.

    def setup_environment(self) -> None:
        trainer = self._trainer
        self._accumulated = trainer.accumulate_grad_batches  # which `teardown` restores
        super().setup_environment()
        if trainer._accelerator_connector.use_distributed_sampler:
            # `process_dataloader` splits loaders; Lightning's sampler would split them before.
            trainer._accelerator_connector.use_distributed_sampler = False
            self._splits_loaders = True
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
        ):
            loop._results = EvaluationLog(self._weight)
        trainer._logger_connector.__class__ = EvaluationConnector

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._loaded_folder = False
        if trainer.state.fn == TrainerFn.FITTING:
            self._release()
            self.model_to_device()
            self.setup_optimizers(trainer)
        elif not self._owns_module:
            self.model_to_device()
            _sync_module_states(self.model)
        self.setup_precision_plugin()

    @property
    def _owns_module(self) -> bool:
        return self._owned is not None and self._owned is self.lightning_module

    def _release(self) -> None:
        """Give the model of an earlier `fit` back. Collective."""
        if self._optimizer is not None:
            self._reset_optimizers_and_schedulers()
            self._optimizer.release()
            self._optimizer = self._owned = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Plan, and build the optimizer with the class and options of `configure_optimizers`."""
        module = self.lightning_module
        assert module is not None
        check_trainer(trainer, module)
        if self._lengths is not None:
            check_batch_hooks(module)
        trainer.accumulate_grad_batches = 1
        self._train_loader = self._result = self._profile = None
        trainer.fit_loop._skip_backward = True  # `training_step` runs the backward of each pass
        self._plan = self._given_plan
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
        recipe = OptimizerRecipe.of(check_configured(optimizers))
        del optimizers
        # Loaders are built again: `configure_optimizers` may have asked for the number of steps.
        trainer.fit_loop._combined_loader = None
        self._plan = self._given_plan or self._tuned(trainer, module, recipe)
        self._check_plan(self._plan)
        check_stage(trainer, self._plan.stage)
        optimizer = HeteroZeroOptimizer(
            module,
            recipe.optimizer_class,
            plan=self._plan,
            params=recipe.groups,
            compute_dtype=self._dtype_of(module),
            timeout=self._waits,
            **self._engine_options,
            **recipe.options,
        )
        for config in schedulers:
            attach(config.scheduler, optimizer)
        if schedulers:
            StepCounter(optimizer)
        optimizer._training.scale_loops()
        if self._profile is not None and self._replan != "off":
            optimizer.follow_drift(self._profile, replan=self._replan, leave_out="never")
        self._optimizer, self._owned = optimizer, module
        if self._given_plan is not None:  # else `autotune` has looked
            optimizer._training.checks.loss.expect(
                self._discarded_loss, "to PoplarStrategy", self._weight
            )
        self._check_autocast()
        self.optimizers, self.lr_scheduler_configs = [optimizer], schedulers
        rank_zero_info(str(self._plan))

    def _dtype_of(self, module: nn.Module) -> torch.dtype | Literal["auto"]:
        return own_dtype(module) if self._compute_dtype is None else self._compute_dtype

    def _check_plan(self, plan: Plan) -> None:
        plan.check_all_active("PoplarStrategy")
        loader = self._loader_of_user()
        if batches.follows_a_plan(loader):
            if self._lengths is not None:
                raise ValueError(
                    "the training loader follows a plan, so pass lengths= to its "
                    "HeteroBatchSampler, not to PoplarStrategy"
                )
            return
        expected = self._global_batch(loader)
        if plan.global_batch != expected:
            raise ValueError(
                f"the plan has a global batch of {plan.global_batch}, but the Trainer has "
                f"{expected}: batch_size {loader.batch_sampler.batch_size} x "
                f"accumulate_grad_batches {self._accumulated} x {self.world_size} devices; make "
                "them equal"
            )

    def _check_autocast(self) -> None:
        """Check that every device has bf16, for autocast. Collective."""
        if not isinstance(self.precision_plugin, AutocastPrecision):
            return
        control = self.optimizer.control
        has_bf16 = describe(self.root_device).has_bf16
        by_rank = control.exchange_objects(has_bf16, what="the precision of the ranks")
        if not all(by_rank):
            lacking = [rank for rank, native in enumerate(by_rank) if not native]
            raise ValueError(
                f"precision='bf16-mixed', but the devices of rank(s) {lacking} only emulate bf16 "
                "(compute capability below 8.0); use precision='32-true'"
            )

    # The plan.

    def _tuned(self, trainer: Any, module: pl.LightningModule, recipe: OptimizerRecipe) -> Plan:
        """The plan of `autotune`. Collective."""
        loader = self._loader_of_user()
        if batches.follows_a_plan(loader):
            raise ValueError(
                "the training loader follows a plan, so PoplarStrategy needs it: pass plan="
            )

        clip = trainer.gradient_clip_val
        with discarding(trainer, module):
            tuned = tune(
                module,
                self._loss_of_a_step,
                self._example(loader),
                global_batch=self._global_batch(loader),
                optimizer_class=recipe.optimizer_class,
                weight=self._weight,
                lengths=self._lengths,
                compute_dtype=self._dtype_of(module),
                max_norm=float(clip) if clip else None,
                timeout=self._waits,
                progress=self.is_global_zero,
                **self._tuning,
                **recipe.options,
            )
        self._profile = tuned.profile
        return tuned.plan

    def _loss_of_a_step(self, module: Any, batch: Any) -> Tensor:
        """The loss of a batch outside of a step."""
        return loss_of(self._run_step(module, batch, *batch_index(module, 0)))

    def _discarded_loss(self, module: Any, batch: Any) -> Tensor:
        """As `_loss_of_a_step`; nothing is logged."""
        with discarding(self._trainer, module):
            return self._loss_of_a_step(module, batch)

    def _loader_of_user(self) -> Any:
        """The training loader, as the user has built it."""
        if self._train_loader is None:
            self._train_loader = _request_dataloader(self._trainer.fit_loop._data_source)
            batches.check_train_loader(self._train_loader)
        return self._train_loader

    def _global_batch(self, loader: Any) -> int:
        size: int = loader.batch_sampler.batch_size
        return size * self._accumulated * self.world_size

    def _example(self, loader: Any) -> Any:
        """The first batch of the dataset, on the device."""
        size = min(loader.batch_sampler.batch_size, len(loader.dataset))
        batch = loader.collate_fn([loader.dataset[index] for index in range(size)])
        assert self.lightning_module is not None
        batch = self.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch)

    # Loaders.

    _splits_loaders = False

    def process_dataloader(self, dataloader: object) -> object:
        """The loader of this rank: by the plan to train, evenly to evaluate."""
        trainer = self._trainer
        if not trainer.training:
            if not self._splits_loaders:
                return dataloader
            rank, size = self.global_rank, self.world_size
            return batches.even(dataloader, rank, size, predicting=bool(trainer.predicting))
        self._train_loader = dataloader
        batches.check_train_loader(dataloader)
        if batches.follows_a_plan(dataloader):
            # Overfitting repeats the batches of one epoch.
            return dataloader if trainer.overfit_batches else batches.following(dataloader, trainer)
        plan = self._plan if self._optimizer is None else self.plan
        if plan is None:  # only the number of steps is asked for, which no plan changes
            samples = self._global_batch(dataloader)
            plan = Plan.even(self.world_size, global_batch=samples, micro_batch=samples, stage=0)
        return batches.planned(
            dataloader,  # type: ignore[arg-type]
            plan,
            self.global_rank,
            trainer,
            self._lengths,
        )

    # A step.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the passes of a step: `training_step` and a backward for each micro-batch.

        Returns:
            What the last pass returned, with a loss of 0, which `optimizer_step` sets to that of
            the global batch.
        """
        trainer, optimizer, module = self._trainer, self.optimizer, self.lightning_module
        assert module is not None
        batch, *rest = args
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        loop._on_before_zero_grad(optimizer)
        loop._optimizer_zero_grad(trainer.fit_loop.batch_idx, optimizer)
        weights: list[float] = []

        def weight(micro_batch: Any) -> float:
            assert self._weight is not None
            weights.append(float(counted(self._weight, micro_batch)))
            return weights[-1]

        output: Any = None
        with self._collecting(trainer) as log:
            self._step = RunningStep(optimizer, log)
            # As a context: Lightning keeps an exception of `training_step`, and this frame with it,
            # while the other ranks wait for the passes.
            with optimizer.micro_batches(batch, weight if self._weight else None) as passes:
                for number, micro_batch in enumerate(passes):
                    current = optimizer._training.engine.step.open_micro_batch
                    assert current is not None
                    # Not counted in the collated batch, whose rows need not be its samples.
                    log.weight = weights[number] if self._weight else float(current.samples)
                    output = self._run_step(module, micro_batch, *rest, **kwargs)
                    loss = loss_of(output)
                    self._step.add_loss(loss)
                    self.backward(optimizer._training.scaled_loss(loss), optimizer)
                    del loss
            optimizer._training.unscale()
            self._step.passes_done()
        shown = torch.zeros((), device=self.root_device)
        return {**output, "loss": shown} if isinstance(output, Mapping) else shown

    @contextmanager
    def _collecting(self, trainer: Any) -> Iterator[PassLog]:
        """A context in which `self.log` keeps the values of the passes."""
        loop = trainer.fit_loop.epoch_loop
        results = loop._results
        idle = [rank for rank in range(self.world_size) if not self.plan.samples(rank)]
        log = PassLog(results, idle[0] if idle else None)
        loop._results = log
        try:
            yield log
        finally:
            loop._results = results

    def _run_step(self, module: pl.LightningModule, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the passes in `closure`, clip and update; then all ranks log. Collective."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        step, self._step = self._step, None
        if step is not None:
            loss, self._result = step.finish(self.root_device)
            outcome = closure._result if isinstance(closure, Closure) else None
            if outcome is not None and outcome.loss is not None:
                outcome.loss.copy_(loss)
        return result

    # Evaluation.

    def on_validation_start(self) -> None:
        """A rank without samples evaluates with the trained buffers. Collective."""
        if self._owns_module:
            take_trained_buffers(self.optimizer._training.engine, doing="the evaluation")

    on_test_start = on_predict_start = on_validation_start

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves the state."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a folder; if weights only, a file for `load_from_checkpoint`. Collective."""
        path = Path(self.broadcast(filepath))
        if "optimizer_states" in checkpoint and self._owns_module:
            if storage_options is not None:
                raise TypeError("PoplarStrategy saves to a local folder; drop storage_options=")
            checkpoints.save_folder(path, self.optimizer, self.broadcast(checkpoint))
            return
        module = self.lightning_module
        assert module is not None
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with exact_values(self.optimizer) if self._owns_module else nullcontext():
            weights = get_model_state_dict(module, options=whole)  # empty on ranks other than 0
        super().save_checkpoint({**checkpoint, "state_dict": weights}, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder into the optimizer and its model, or read a file. Collective."""
        path = Path(self.broadcast(checkpoint_path))
        if not complete_name(path).is_dir():
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return loaded
        tensors_only = weights_only is not False
        if self._trainer.state.fn != TrainerFn.FITTING:
            return checkpoints.read_folder(path, weights_only=tensors_only)
        self._loaded_folder = True
        module = self.lightning_module
        assert module is not None
        return checkpoints.load_folder(path, self.optimizer, module, weights_only=tensors_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As Lightning's; of adapters that were saved alone, the base stays as it is."""
        if self._loaded_folder:
            return
        if strict and checkpoints.BASE in checkpoint:
            assert self.lightning_module is not None
            checkpoints.load_adapters(self.lightning_module, checkpoint, self._trainer.ckpt_path)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of a plain optimizer, of a file that another strategy has saved."""
        (state,) = checkpoint["optimizer_states"]
        self.optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End of `fit`; the optimizer keeps the model, so that it can be evaluated and saved."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            trainer.accumulate_grad_batches = self._accumulated
            trainer.fit_loop._skip_backward = False
        self._train_loader = None
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
