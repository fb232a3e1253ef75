"""`HeteroZeroOptimizer`: the public API of the engine, a `torch.optim.Optimizer`.

`train_step` splits the batch, agrees on the weights, runs the passes, agrees on the result, and
updates. The ZeRO stages are in `poplar.zero`, the transports in `poplar.comm`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.checkpoint.state_dicts.optimizer_state import collected_state_dict, copy_state
from poplar.comm import Communicator, Control, connect_control
from poplar.system.trace import Span
from poplar.training.active_ranks import ActiveRanks
from poplar.training.plan_changes import PlanChanges
from poplar.training.trained_model import TrainedModel
from poplar.training.unsharded_model import full_parameters, release
from poplar.training.whole_step import PLAIN_SCALER, apply_step, open_batch, scaler_of, take_step
from poplar.values.communication import Communication, Precision
from poplar.values.errors import agreed, check_class
from poplar.values.formatting import format_names
from poplar.values.plan import Plan
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.collective_calls import CollectiveCalls, begins_step, collective, new_group
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.held_memory import HeldMemory, OnOutOfMemory, held_memory
from poplar.zero.micro_batch_loop import MicroBatchLoop
from poplar.zero.micro_batch_loss import LossFunction, MicroBatchLoss, PassLoss
from poplar.zero.micro_batches import Loss, MicroBatch, OpenedStep, Weight
from poplar.zero.optimizers.granularity import Granularity, OptimizerFactory
from poplar.zero.optimizers.optimizer_class import check_option_names, check_overrides
from poplar.zero.setup import BUILDING, Arguments, Request, agree_on_request, check_request
from poplar.zero.steps.evaluation import Evaluation
from poplar.zero.steps.nonfinite import OnNonFinite
from poplar.zero.steps.step import Step
from poplar.zero.steps.step_result import StepResult
from poplar.zero.steps.step_state import Phase
from poplar.zero.weights.initial_values import Weights

if TYPE_CHECKING:
    from poplar.checkpoint.training_state import TrainingParts
    from poplar.drift.speed_follower import SpeedFollower
    from poplar.planner.search import Choice
    from poplar.values.profile import ClusterProfile


class HeteroZeroOptimizer(torch.optim.Optimizer):
    """Trains `model` with ZeRO on ranks with different batches, passes and shares of the state.

    The gradient is the same as on one big device, for every plan:

        g = sum over ranks r, passes s of  w[r][s] * grad(mean loss of micro-batch (r, s))
        w[r][s] = samples of micro-batch (r, s) / samples of all ranks in this step

    With `weight=f`, `f(micro_batch)` replaces the number of samples (`weight=poplar.tokens()` for a
    loss that is a mean over tokens). `loss="sum"` makes each weight `1 / total`, and
    `loss="global_mean"` makes it 1, for losses that are already divided. Gradients are weighted and
    added in fp32, in rank order: at one stage, the same batches give the same bits for any shares
    (except for layers in `Plan.factored`, whose products the BLAS library adds).

        plan = Plan.proportional(speeds, global_batch=512, stage=2, max_micro_batch=16)
        optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=3e-4)
        for batch in loader:                                  # this rank's part of a global batch
            result = optimizer.train_step(loss_fn, batch, max_norm=1.0)

    Trainers that own their loop get the same gradient with:

            for micro_batch in optimizer.micro_batches(batch):
                loss_fn(model, micro_batch).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    A backward outside `micro_batches` is one pass of weight `1 / ranks`, and every rank must run
    it; it raises if the plan gives the ranks different numbers of samples. It is the last pass of
    the step unless it runs inside `no_sync()`. A unit's gradients are removed from `.grad` as soon
    as its backward is over. At stage 0, `.grad` holds the mean gradient on every rank between the
    last pass and `step()`: where no rank has one, None, or zeros if all parameters had one in the
    step before. A tensor that is set there on all ranks is applied. At other stages it is a
    placeholder then, which raises when it is used: torch's `clip_grad_norm_` cannot work on one
    rank's slices. At every stage `.grad = None` between them, on all ranks, leaves a parameter out
    of the step. After `step()` it is None.

    Collective methods, which every rank must call: the constructor, `train_step`, `micro_batches`,
    `clip_grad_norm_`, `step`, `evaluate`, `full_parameters`, `load_state_dict`,
    `consolidate_state_dict`, `full_state_dict`, `save_model`, `apply_plan`, `full_gradients`,
    `follow_drift`, `verify_replicas`, `release`. If a rank fails in one, all ranks raise. Either
    nothing has been applied and training may continue, as after an error of `loss_fn`; or all ranks
    are stopped, and every later call raises the cause, as after an error in the update itself.

    A rank that the plan leaves out (`Plan.left_out`, `is_active`) makes the same calls and gets the
    same results, without a collective in any step: `micro_batches` yields nothing there, and other
    calls wait until the active ranks have made theirs. Its model is current inside
    `full_parameters()`, and after `release()`: elsewhere a call of the model and
    `model.state_dict()` raise, as `state_dict()` always does.

    At stage 3, outside `full_parameters()`, `model.state_dict()` has a `ShardTensor` with this
    rank's part of each parameter, for `torch.distributed.checkpoint`; `torch.save` refuses it.
    `model.load_state_dict` takes such parts and whole tensors, on every rank, without unsharding.

    Args:
        model: on this rank's device, with the same architecture on every rank, not wrapped in DDP
            or FSDP. The values and buffers of the first rank are broadcast. Or on `meta` (see
            `poplar.parameters_on_meta`): it is then built here, and no rank holds more than its
            part of the state and one unit.
        optimizer_class: the class of the update. A param group may have its own, as its key
            `"optimizer_class"`, whose options are those of the group alone: Muon for matrices
            beside AdamW for the rest.
        plan: batches, passes and shares of each rank, persistent and recomputed units, factored
            layers. None: even shares at `stage`; each rank's batch is one pass, of any size.
        stage: ZeRO stage 0, 1, 2 or 3; only without a plan.
        params: parameters or param groups of the model, as for `torch.optim`; default: all that
            require a gradient. Freeze the others (`requires_grad_(False)`): no rank reduces their
            gradients, so with several ranks there is a warning.
        process_group: default WORLD; NCCL for CUDA, gloo for CPU. Optimizers that share one share
            its failures: a failed collective closes the connections for all of them.
        units: module names, modules or module classes that form the units. Default: repeated
            blocks; all other parameters form the root unit.
        compute_dtype: dtype of the parameters in forward and backward; master values stay fp32.
            "auto": an fp32 model on CUDA computes in bf16 if every rank supports it natively, else
            in fp16. Any other model is unchanged. fp16 needs a loss scale: `train_step` has one,
            other loops use `poplar.GradScaler`, or `step` raises. bf16 and fp16 also cast the
            floating-point inputs of the model, or of a module of it (outside units, or a unit) that
            `loss_fn` calls directly. `loss_fn` gets its batch unchanged, so targets stay fp32, and
            computes the loss in the dtype that the model returns. Frozen parameters are cast, too,
            and have no master values, so that a moving average in them would stand still: if they
            are written in step after step, there is a warning.
        reduce_dtype: dtype in which gradients are sent; they are added in fp32.
        communication: for slow networks, "int8" or "int4": gradients and parameters are sent with 8
            or 4 bits per element and unbiased random rounding, so the training is no longer exact;
            or a `Communication`. Default: that of the plan, else "exact".
        communicator: "auto" (from the plan, else from where the ranks are), "process_group" (NCCL
            or gloo), "shared_memory" (CPU ranks of one host), "hierarchical" (several hosts; on
            GPUs "hierarchical:process_group") or a `poplar.comm.Communicator`.
        timeout: how long a rank waits for other ranks; default: 5 minutes; with NCCL less if
            the process group's timeout is shorter than 7 minutes.
        allow_forward_state: accept state that forwards write and that differs between ranks: the
            statistics of BatchNorm in training mode (never of SyncBatchNorm), counts, codebooks and
            frozen teachers by moving average, running normalizers, `spectral_norm` with unequal
            passes; also BatchNorm without running statistics, which takes those of a micro-batch,
            and embeddings with `scale_grad_by_freq`, which count a micro-batch.
            Each rank then has its own, also in `model.state_dict()`. `save_model` writes the
            buffers of the first rank that has samples.
        weights: the values of the parameters: the path of a safetensors file, of an index as
            Hugging Face writes it, or of a folder with either; or, for a model on `meta`, a
            function that initializes the parameters of one module, as for `model.apply`. Default:
            the values of the model, or, on `meta`, those that its constructors (that is
            `reset_parameters`) and then its `_init_weights(module)`, if any, set. They have the
            bits of a model that was built on the CPU in the first rank's random state.
        device: of the parameters, if the model is on `meta`; default: the current CUDA device if
            the process group has NCCL, else the CPU.
        on_out_of_memory: if a rank runs out of memory in `train_step`: "retry" runs the same global
            batch again on all ranks, in smaller micro-batches on that rank, and keeps the changed
            plan; "raise" raises on all ranks.
        on_nonfinite: if a loss of `train_step` or the gradient norm is NaN or infinite (also if the
            sum of squares of a gradient overflows in fp32): no rank applies the step, and "raise"
            raises on all ranks, naming rank and pass if losses are known; "skip" continues, with a
            warning and `result.skipped`, unless the parameters are not finite either. On CUDA
            the device decides and the host does not wait for it, so "raise" raises in the next
            step, or when values are read or saved: `evaluate`, `full_parameters`, `state_dict`,
            `full_state_dict`, `save_model`, `poplar.save_checkpoint`. (An optimizer class that
            cannot skip on the device has applied the step by then.) With a loss scaler, the scaler
            decides.
        granularity: what the class needs: "elements" (AdamW, SGD), a number (blocks of so many
            elements of one parameter, as for 8-bit state), or "parameter" (whole tensors, as for
            Muon and Adafactor; stages 0 to 2). Shards are cut accordingly, as near to the shares as
            can be: over the model, a rank's elements differ from its share by at most the largest
            parameter. Default: as known of the classes of torch, bitsandbytes, torchao and
            transformers; else a test step shows whether elements suffice. A param group with its
            own class may have its own `"granularity"`.
        **optimizer_kwargs: for `optimizer_class`; `fused=True` is added if the class supports it.

    Raises:
        ValueError, TypeError, RuntimeError: arguments of this rank are wrong, or ranks differ.
        RankFailed: arguments of another rank are wrong.
    """

    # Makes a plain GradScaler call step() with its scale, so that step() can reject it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: OptimizerFactory,
        *,
        plan: Plan | None = None,
        stage: int | None = None,
        params: Iterable[Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        units: Sequence[str | nn.Module | type[nn.Module]] | None = None,
        compute_dtype: torch.dtype | Literal["auto"] = "auto",
        reduce_dtype: torch.dtype = torch.float32,
        communicator: str | Communicator = "auto",
        communication: Precision | Communication | None = None,
        timeout: timedelta | None = None,
        allow_forward_state: bool = False,
        weights: Weights = None,
        device: torch.device | str | None = None,
        on_out_of_memory: OnOutOfMemory = "retry",
        on_nonfinite: OnNonFinite = "raise",
        granularity: Granularity | None = None,
        _local: Collection[str] = (),  # see [Note: local parameters] in `zero.stages.strategy`
        **optimizer_kwargs: Any,
    ) -> None:
        arguments = Arguments(
            model=model,
            optimizer_class=optimizer_class,
            options=optimizer_kwargs,
            plan=plan,
            stage=stage,
            params=params,
            units=units,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            communication=communication,
            allow_forward_state=allow_forward_state,
            weights=weights,
            device=device,
            on_out_of_memory=on_out_of_memory,
            on_nonfinite=on_nonfinite,
            granularity=granularity,
            local=_local,
        )

        def check() -> Request:
            if plan is not None:
                check_class("plan", plan, Plan)
            if isinstance(communicator, Communicator) and plan is not None and plan.left_out:
                raise ValueError(
                    "a communicator object is for all ranks, but the plan leaves some out; pass "
                    "its name"
                )
            own = inspect.signature(HeteroZeroOptimizer).parameters
            check_option_names(optimizer_class, optimizer_kwargs, own)
            request = check_request(arguments, group)
            check_overrides(request.classes, request.groups, model)
            return request

        with new_group(process_group, timeout, BUILDING) as group:
            control = connect_control(group, communicator)
            request = run_on_all_ranks(control, check, doing=BUILDING)
            request = agree_on_request(control, request)
            left_out: tuple[int, ...] = ()
            if request.plan is not None:
                left_out = request.plan.left_out
                request = replace(request, plan=request.plan.of_active_ranks())
            has_values = not request.values.on_meta
            ranks = ActiveRanks(group, control, communicator, left_out, has_values=has_values)
            super().__init__([dict(group) for group in request.groups], {})
            self.register_state_dict_post_hook(copy_state)
            self._settings_are_final = True
            self._training = TrainedModel(self, request, ranks)
            self._changes = PlanChanges(self._training)

    @property
    def collective_calls(self) -> CollectiveCalls:
        """Its methods that all ranks call; for integrations."""
        return self._training.calls

    @property
    def is_active(self) -> bool:
        """Whether this rank trains; False: the plan leaves it out (`Plan.left_out`)."""
        return self._training.ranks.is_active

    @property
    def state(self) -> Any:
        """The state of each parameter, as this rank has it. Set it to an empty dict to reset it.

        It has what the optimizer class keeps. Values can be set in it, but no further keys: keep
        what a wrapper needs in a dict by parameter. Between steps `.grad` is None.

        Raises:
            RuntimeError: the plan leaves this rank out, or after `release()`: there is no state.
        """
        return self._training.state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        if "_training" not in vars(self):  # in the constructor of the base class
            return
        if values:
            raise ValueError(
                "optimizer.state can only be set to an empty dict, on all ranks, which resets the "
                "state; use load_state_dict() to load one"
            )
        self._training.update.reset_state()

    # The step.

    @begins_step
    def train_step(
        self,
        loss_fn: LossFunction,
        batch: Any,
        *,
        weight: Weight | None = None,
        loss: Loss = "mean",
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
    ) -> StepResult:
        """One optimizer step on one global batch. Collective.

        At stages 0 to 2, the first forward of a rank runs before it knows whether the other ranks
        have a valid batch. So `loss_fn` must not call collectives itself.

        In the first step, one rank calls `loss_fn` again, for parts of a micro-batch and without a
        forward of the model, and warns if the loss is not the mean over what `weight` counts.

        Args:
            loss_fn: `loss_fn(model, micro_batch)` -> scalar loss of the micro-batch.
            batch: this rank's part of the global batch: any pytree of tensors, split along dim 0. A
                rank without samples in the plan passes None, or one sample, which is dropped.
            weight: `weight(micro_batch)` -> its weight; default: its number of samples.
            loss: what `loss_fn` returns: the "mean" over what `weight` counts, the "sum", or the
                sum already divided by the global total ("global_mean").
            max_norm: clip the gradient to this norm in the update. At stage 0, `.grad` keeps the
                mean gradient before clipping.
            scaler: loss scaler for fp16; default, and in place of a disabled one: an internal one
                if the model has fp16 parameters.

        If a rank runs out of memory and smaller micro-batches may fit, `weight` and `loss_fn` are
        called again, for the same samples: see `on_out_of_memory`. What forwards change besides
        gradients, such as buffers and random states, has then changed in the failed passes too.

        Raises:
            RankFailed: another rank failed, so no rank has stepped. If this rank's `loss_fn` fails,
                this rank raises that exception instead.
            torch.OutOfMemoryError: this rank ran out of memory, also on the CPU.
            CollectiveTimeout: a rank did not take part in a collective before the deadline.
        """
        training = self._training
        scaler = scaler_of(training, scaler)

        def prepare() -> None:
            nonlocal loss_fn
            if scaler is not None:
                if not isinstance(scaler, GradScaler):
                    raise TypeError(PLAIN_SCALER)
                scaler.make_scale(training.engine.trained[0].device)
            if loss == "mean":
                loss_fn = training.checks.loss.watched(loss_fn, weight)

        def open_passes(again: Callable[[], None] | None) -> tuple[OpenedStep, PassLoss]:
            version = self._changes.schedule.version
            opened = open_batch(training, again or prepare, batch, weight, loss, version)
            own_loss = training.calls.of_user(loss_fn)
            return opened, MicroBatchLoss(own_loss, training.model, training.ranks.group.name)

        return take_step(training, open_passes, max_norm, scaler)

    def micro_batches(
        self, batch: Any, weight: Weight | None = None, loss: Loss = "mean"
    ) -> MicroBatchLoop:
        """Iterate over this rank's micro-batches of a global batch. Collective.

        Yields the micro-batches that have samples; run one backward for each. Passes without
        samples are run in between. Leaving the loop before its end abandons the step on all ranks.
        If the iterator is kept in a variable, an exception in the body of the loop does not end it.
        Then use it as a context manager, whose exit does, and tells all ranks the exception:

            with optimizer.micro_batches(batch) as micro_batches:
                for micro_batch in micro_batches:
                    loss_fn(model, micro_batch).backward()

        Args:
            batch: as for `train_step`.
            weight: as for `train_step`.
            loss: as for `train_step`.
        """
        training = self._training

        def prepare() -> None:
            if loss == "mean":
                training.checks.loss.watch_loop(training.model, batch, weight)

        def begin() -> Step | None:
            with running(left_out=True):
                self._begin_step()
            return training.step if self.is_active else None

        def start() -> list[MicroBatch]:
            version = self._changes.schedule.version
            opened = open_batch(training, prepare, batch, weight, loss, version)
            return training.step.start(opened)

        def running(left_out: bool = False) -> AbstractContextManager[None]:
            return training.calls.running("micro_batches()", left_out=left_out)

        return MicroBatchLoop(training.step, start, running, begin)

    @collective
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradient of the step. Collective.

        Gradients that the user has set in `.grad` without a backward are one pass; each rank's have
        weight `1 / ranks`.

        Raises:
            RankFailed: another rank could not finish its passes, so no rank has stepped.
            RuntimeError: no backward since the last step, a plain `torch.amp.GradScaler`, or fp16
                parameters without a `poplar.GradScaler`.
        """
        name = f"Optimizer.step#{type(self).__name__}.step"
        with torch.autograd.profiler.record_function(name):
            return apply_step(self._training, self._changes, closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch does not run the hooks around it

    @collective
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the full gradient so that its norm is at most `max_norm`. Collective.

        Args:
            max_norm: at least 0.
            norm_type: more than 0; infinity: the largest absolute value.

        Returns:
            The norm over all parameters before clipping, as one fp32 on the device. For `norm_type`
            2 and infinity its bits do not depend on the shares.

        Raises:
            ValueError: arguments of this rank are wrong, or ranks differ.
            RankFailed: arguments of another rank are wrong, or it could not finish its passes.
        """
        self._training.unscale()
        settings = self._training.settings(max_norm=max_norm, norm_type=norm_type)
        return self._training.step.clip(settings)

    @collective
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step. `.grad` is always set to None.

        As in torch, it may be called between a forward and its backward.

        Raises:
            RuntimeError: called inside of a `micro_batches` loop, before its last backward was
                applied. The step is abandoned on all ranks.
        """
        engine = self._training.engine
        if self._training.step.leave_user_loop(_ZERO_GRAD_INSIDE_LOOP):
            raise agreed(RuntimeError(_ZERO_GRAD_INSIDE_LOOP))
        engine.drop_parameter_gradients()
        if engine.step.open_micro_batch is None and not engine.hooks.leave_unused_pass():
            engine.hooks.drop_implicit_pass()
            if engine.step.phase is not Phase.EMPTY:
                engine.begin_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backwards outside `micro_batches` that are not the last of their step."""
        if not self.is_active:
            yield
            return
        before = self._training.engine.hooks.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._training.engine.hooks.set_requires_gradient_sync(before)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Like `no_sync`, without a context; as in FSDP2."""
        if self.is_active:
            self._training.engine.hooks.set_requires_gradient_sync(requires_gradient_sync)

    @collective
    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The full mean gradient of every trained parameter, by name. Collective.

        Call it between the last backward and `step()`. Every active rank gets all gradients, in
        fp32 and in the shape of the parameters, so it needs memory for all of them. A rank that the
        plan leaves out gets none: an empty dict.
        """
        engine, step = self._training.engine, self._training.step
        step.reject_open_loop()
        self._training.unscale()

        def prepare() -> list[Tensor]:
            step.finish_passes()
            return engine.empty_gradients()

        memory = run_on_all_ranks(self.control, prepare, doing="full_gradients()")
        factor = 1.0 if engine.step.factor is None else engine.step.factor
        return {name: gradient.mul_(factor) for name, gradient in engine.full_gradients(memory)}

    @collective
    @torch.no_grad()
    def verify_replicas(self) -> None:
        """Check that all ranks have the same parameters, bit by bit. Collective, between steps.

        At stage 0 every rank updates all parameters. `step` checks them too, after the first
        updates and then after every 100th. So it does at stages 1 and 2 if updates are sent as
        compressed differences. Otherwise there are no such replicas to check.

        Raises:
            ReplicasDiffer: on all ranks; names the first parameter that differs.
        """
        training = self._training

        def prepare() -> None:
            for flat in training.engine.trained:
                training.update.take_written_values(flat)

        training.checks.replicas.verify(prepare)

    def trace(self) -> AbstractContextManager[list[Span]]:
        """A context that records this rank's passes, waits and updates as spans.

        With NCCL they are times of the device, and the context waits for it at its end.
        """
        return self._training.ranks.group.trace.record()

    @collective
    def release(self, values: bool = True) -> None:
        """Detach the optimizer from the model. Collective.

        Every parameter gets its own memory with its current value, in the dtype that it had when
        the optimizer was built: of an fp32 model, the master values. Frozen parameters have the
        values that the model computed with. Hooks are removed and `.grad` is None. This optimizer
        cannot be used any more, but another one, for example at another stage, can take the model.
        A rank that the plan leaves out gets the parameters and buffers of the first active rank,
        also if the model was built on `meta`.

        Args:
            values: False drops the values and puts the parameters on `meta`: nothing is unsharded
                or sent. Buffers keep their values.

        Raises:
            RuntimeError: called in the middle of a step or inside `full_parameters()`, or, with
                `values=False`, while a loss or an output exists whose graph holds parameters.
        """
        release(self._training, values)

    # Without a step.

    @collective
    @torch.no_grad()
    def evaluate(
        self, loss_fn: LossFunction, loader: Iterable[Any], weight: Weight | None = None
    ) -> float:
        """Exact mean loss over the batches of all ranks, in eval mode. Collective.

        Ranks may have different numbers of batches, or none; one that is left out must have none.
        If `follow_drift` may leave out ranks, such a rank drops its batches, with a warning: the
        mean is then over those of the other ranks.

        A rank without samples in the plan first gets the buffers that are saved for all ranks, as
        the statistics of BatchNorm, because its own are not trained.

        Args:
            loss_fn: as for `train_step`; it returns a mean. It is called without gradients: a loss
                that needs some (forces, the residual of a differential equation) computes them in
                `with torch.enable_grad():`.
            loader: this rank's batches. Those of a `HeteroBatchSampler` are dropped on a rank that
                has no samples in its plan. Those of `CollateMicroBatches` are split as in
                training.
            weight: as for `train_step`.

        Raises:
            RankFailed: another rank could not load or evaluate a batch.
            ValueError: no rank had a batch, or a weight is negative or not finite.
        """
        training = self._training
        training.step.nonfinite.raise_if_found()
        loss_fn = training.calls.of_user(loss_fn)
        with self._changes.schedule.evaluation():
            return Evaluation(training.engine, loss_fn, weight, training.splitter).run(loader)

    def full_parameters(
        self,
        writeback: bool = False,
        *,
        modules: Sequence[str | nn.Module] | None = None,
        masters: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which parameters are unsharded on every rank. Collective at both ends.

        Inside, `copy.deepcopy(model)` makes a plain model that the optimizer does not know. What is
        kept of the parameters, such as `model.state_dict()`, keeps its values and its memory after
        the context, at stage 3; elsewhere it is the memory of the model, as in torch. Where updates
        are sent as compressed differences (`communication=` at stages 1 and 2), all ranks get the
        exact values first; `model.state_dict()` outside has what they compute with.

        Args:
            writeback: keep values that are written into the parameters (equal on all ranks), for
                example by `model.load_state_dict`; otherwise changes are lost at stage 3 and with
                `masters`.
            modules: unshard only the units that have parameters of these modules of the model, or
                of modules with these names. Default: all.
            masters: parameters have their fp32 values, which differ from those that the model
                computes with in 16 bits. Run no forward inside: inputs are cast to 16 bits.

        Raises:
            ValueError: the model has no such module, or ranks pass different ones.
            RuntimeError: called in a pass or inside `full_parameters(masters=True)`, or, with
                `masters`, inside any `full_parameters()`.
        """
        return full_parameters(self._training, writeback, modules, masters)

    @property
    def control(self) -> Control:
        """The channel for small values of all ranks; for integrations."""
        return self._training.ranks.control

    @property
    def plan(self) -> Plan | None:
        """The current plan; None without one."""
        return self._training.plan

    @property
    def pending_plan(self) -> Plan | None:
        """The plan to which `apply_plan` changes at a later step; None if there is none."""
        return self._changes.schedule.latest

    @property
    def largest_batches(self) -> dict[int, int]:
        """By rank, the largest micro-batch to which running out of memory has reduced it.

        Equal on all active ranks. `profile.with_largest_batches(optimizer.largest_batches)` makes
        plans that respect it.
        """
        return dict(self._training.largest_batches)

    def memory(self) -> HeldMemory:
        """Bytes that this rank holds now, by kind, beside its peak and the plan's prediction."""
        training, plan = self._training, self._training.request.plan
        prediction = (plan.prediction if plan is not None else None) or {}
        by_rank = prediction.get("memory_bytes")
        predicted = None if by_rank is None else int(by_rank[training.ranks.group.rank])
        return held_memory(training.engine, training.update, predicted=predicted)

    @property
    def steps(self) -> int:
        """Steps that have begun: calls of `train_step` and loops of `micro_batches`.

        In loops that use neither, calls of `step`.
        """
        return self._changes.schedule.steps

    @collective
    def apply_plan(self, plan: Plan, at_step: int | None = None) -> int:
        """Change to another plan between two steps. Collective, between steps.

        Batches, passes, shares, the stage, the sets of persistent and of recomputed units and the
        state in host memory may change; the transport and the factored layers do not. Values,
        optimizer state and step counts are sent directly from their old owners to their new ones,
        one unit at a time. Another stage makes the engine anew: its next passes agree on the order
        of collectives again.

        The plan may also leave out other ranks than now, or none: a rank that comes back gets
        parameters, buffers and its share, and one that is left out keeps the parameters of now, or
        NaN where they were sharded (memory for all of them, unless the model was built on `meta`).
        The ranks that are left out make the call, too. A scaler of the user has on a rank that
        comes back what it had there.

        The logger "poplar" reports the seconds, and `trace` has a span.

        The `HeteroBatchSampler` from which the batches of the steps come follows at the same step,
        and its global batches stay the same. `DataLoader` workers draw batches ahead, which belong
        to the plan of now. So the plan takes effect after the batches that any rank has drawn. A
        stream (`split_stream`) follows if no workers read it. If the steps take batches of several
        samplers (zipped loaders, tasks in turns), the plan cannot change.

        Args:
            plan: the new plan, the same on all ranks.
            at_step: the number of the step from which on the plan is in force, counted as `steps`;
                default: the first possible one.

        Returns:
            That number. If it is `steps`, the next step's, the plan is in force now.

        Raises:
            ValueError: the plan has another world size or factors other layers, the optimizer class
                does not support its stage, `at_step` is too early, the batches of the steps cannot
                follow, or ranks pass different plans.
            RuntimeError: called in the middle of a step, or inside `full_parameters()`.
            CollectiveTimeout: a rank did not make the call before the deadline. A rank that is left
                out, now or by the plan, is needed only if the plan leaves out other ranks.
        """
        return self._changes.apply(plan, at_step)

    @collective
    def follow_drift(
        self,
        profile: ClusterProfile,
        *,
        replan: Literal["auto", "advise", "off"] = "advise",
        steps: int | None = None,
        leave_out: Choice = "auto",
    ) -> SpeedFollower | None:
        """Notice ranks that become slower or faster while training, and plan again. Collective.

            tuned = poplar.tune(model, loss_fn, example_batch, global_batch=512, lr=3e-4)
            optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=tuned.plan, lr=3e-4)
            optimizer.follow_drift(tuned.profile)

        From then on, every step, by `train_step` or `micro_batches`, compares the compute seconds
        of each rank with its profile, for the samples and lengths of the step. If a speed has
        changed and another plan of the same stage and global batch is faster by more than moving
        the state costs, the first active rank logs one line to the logger "poplar". Single slow
        steps and long samples are no change.

        The plan may leave out other ranks than now, if `search` does. A rank that is left out times
        a fixed piece of work, for 1 % of the time; the active ranks do not wait for it. It is taken
        back when it has become so much faster that a plan with it is.

        Args:
            profile: of these ranks, the same on all of them.
            replan: "advise": only report; the plan is `plan` of the result. "auto": apply the plan
                by `apply_plan`, whose sampler follows; if one cannot, report why. "off": stop
                following.
            steps: that are left to train; default: a plan must pay for itself within 1000.
            leave_out: "never": the ranks that are left out stay the same. Use it with a scaler of
                your own, whose state a rank that is taken back does not get.

        Returns:
            What it has found so far; None if it is off.

        Raises:
            ValueError: the optimizer has no plan, the profile is of other ranks, or ranks differ.
        """
        from poplar.drift.speed_follower import follow

        return follow(self, profile, replan, steps, leave_out)

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as views and without communication.

        State with one value per element is a `ShardTensor` of the elements that this rank owns; at
        stage 0 it is a plain tensor. `torch.save` stores these parts, for a rank that owns no other
        elements. `torch.distributed.checkpoint` also loads them under another plan, and torch's
        `get_state_dict` gives the names: see `OptimizerState` for what is in them.

        After `consolidate_state_dict(to)`, on rank `to` and until the next step or load, it is the
        whole state.

        Raises:
            RuntimeError: the plan leaves this rank out, so that it has no state.
        """
        training = self._training
        training.step.nonfinite.raise_here()
        if training.update.collected is not None:
            return collected_state_dict(self, training.update.collected)
        return training.with_own_state(super().state_dict())

    @collective
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state. Collective; nothing changes if it fails on a rank.

        Load the state dict of the model first: `master` in the state of a parameter replaces its
        value.

        Args:
            state_dict: this rank's `state_dict()`; the same after `torch.distributed.checkpoint`
                has loaded it; or a whole state, on all ranks: a `full_state_dict()`, or the
                `state_dict()` of a plain `optimizer_class` with the same param groups. Options such
                as `fused` keep their values.

        Raises:
            ValueError, TypeError: it is of another model or optimizer class, it lacks elements that
                this rank owns, or the ranks loaded the state of different steps.
            RankFailed: it does not fit another rank.
        """
        from poplar.checkpoint.state_dicts.loaded_state import load_state_dict

        training = self._training
        given = self, training.engine, training.update, state_dict
        load_state_dict(*given, training.scaler, training.calls.changing_values)

    @collective
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on rank `to`, for `state_dict()` there. Collective.

        It stays there, in CPU memory, until the next step or load; as that of torch's
        `ZeroRedundancyOptimizer`.
        """
        self._training.update.keep_collected(self.full_state_dict(to))

    @collective
    def full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The whole state, for a plain `optimizer_class` with the same param groups. Collective.

        It has the state of one flat parameter at a time on the device. The param groups have the
        names of the parameters (`param_names`). `master` is the fp32 value of a parameter, where
        the ranks compute with another one: in lower precision, or after compressed updates.

        Returns:
            On rank `to` a state dict on the CPU; None on other ranks.

        Raises:
            ValueError: there is no rank `to`.
        """
        from poplar.checkpoint.sharded_state import full_state_dict

        training = self._training
        training.step.nonfinite.raise_if_found()
        to = training.ranks.receiver(to, "full_state_dict()")
        state = full_state_dict(self, training.engine, training.update, to)
        return None if state is None else training.with_own_state(state)

    def _training_parts(self) -> TrainingParts:
        """What the state of this optimizer consists of; `poplar.save_checkpoint` calls it."""
        from poplar.checkpoint.training_state import TrainingParts

        self._refuse_local("save_checkpoint() and load_checkpoint()")
        training = self._training
        return TrainingParts(
            engine=training.engine,
            update=training.update,
            optimizer=self,
            stage=training.request.stage,
            plan=training.plan,
            scaler=training.scaler,
            reject_nonfinite=training.step.nonfinite.reject_state,
            changes_of_ranks=training.ranks.changes,
            unfinished=training.unfinished,
        )

    @collective
    def save_model(
        self, path: str | Path, *, sharded: bool = False, frozen: bool | None = None
    ) -> None:
        """Write the full weights as safetensors. Collective.

        No rank holds more than its share and one unit. A file gets its name when it is complete.
        Names are those of the model without the parts that `torch.compile` adds (`_orig_mod.`).
        Of a PEFT model, or on a quantised base, adapters are written alone, under their names in
        the model's state dict: `model.load_state_dict(load_file(path), strict=False)`.

        Args:
            path: a file, which rank 0 writes; or, if `sharded`, a folder that all ranks see.
            sharded: every rank writes a file with the parameters of which it holds the largest
                part, and rank 0 `model.safetensors.index.json`, as Hugging Face writes it.
            frozen: frozen parameters are written, too; default: unless adapters are written alone.
                Every rank then needs memory for all quantised parameters.

        Raises:
            OSError, ValueError, TypeError: the model cannot be saved there, or as safetensors.
            PoplarError: a trained parameter has values that are NaN or infinite.
            RankFailed: another rank failed.
        """
        from poplar.checkpoint.saved_model import save_model

        self._refuse_local("save_model()")
        training = self._training
        training.step.nonfinite.reject_state("save_model()")
        training.send_masters()
        given = training.engine, self.control, training.model, path
        save_model(*given, sharded=sharded, frozen=frozen)

    def _refuse_local(self, doing: str) -> None:
        local = [
            name for flat in self._training.engine.flats if flat.is_local for name in flat.names
        ]
        if local:
            raise agreed(
                RuntimeError(
                    f"{doing}: every rank has a part of its own of {format_names(local)}; save the "
                    "state_dict() of what poplar.distribute() returned"
                )
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_settings_are_final", False):
            raise RuntimeError(
                "the parameters of a HeteroZeroOptimizer are fixed when it is built; pass all "
                "param groups to the constructor: params=[{...}, {...}]"
            )
        super().add_param_group(param_group)

    # For other modules.

    def _begin_step(self) -> None:
        """See `PlanChanges.begin_step`."""
        self._changes.begin_step()
        if not self.is_active:
            self._opt_called = True  # no `step` is called here, of which schedulers would warn

    @collective
    @torch.no_grad()
    def _multiply_gradient(self, factor: Tensor) -> Tensor:
        """As `AgreedGradient._multiply_gradient`, for loss scaling. Collective."""
        training = self._training
        return training.step.multiply_gradient(factor, training.settings(scale=factor))


_ZERO_GRAD_INSIDE_LOOP = (
    "zero_grad() inside of the micro_batches loop, whose step is now abandoned on all ranks; the "
    "passes of the loop add up to one step, so call it after step()"
)
