"""`HeteroZeroOptimizer`: the public API of the engine, a `torch.optim.Optimizer`.

`train_step` splits the batch, agrees on the weights, runs the passes, agrees on the result, and
updates. The ZeRO stages are in `poplar.zero`, the transports in `poplar.comm`.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.checkpoint.state_dicts.model_state import ModelState
from poplar.checkpoint.state_dicts.optimizer_state import OptimizerState, collected_state_dict
from poplar.comm import Communicator, Control, connect, connect_control
from poplar.system.out_of_memory import free_cached_memory, free_frames
from poplar.system.trace import Span
from poplar.values.communication import Communication, Precision
from poplar.values.errors import agreed, check_class
from poplar.values.formatting import format_names
from poplar.values.plan import Plan
from poplar.zero.absent_parameter import mark_present
from poplar.zero.agreement import (
    MicroBatchesTooLarge,
    StepSummary,
    caught,
    exchange_results,
    raise_on_any_error,
    run_on_all_ranks,
)
from poplar.zero.checks import model_checks
from poplar.zero.checks.model_structure import ModelStructure
from poplar.zero.checks.step_checks import StepChecks
from poplar.zero.collective_calls import (
    CollectiveCalls,
    LeftOutCalls,
    agreed_failures,
    begins_step,
    collective,
    new_group,
)
from poplar.zero.engine import Engine
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.held_memory import (
    HeldMemory,
    OnOutOfMemory,
    held_memory,
    smaller_batches_message,
)
from poplar.zero.left_out import LeftOutRanks, state_plan
from poplar.zero.micro_batch_loop import MicroBatchLoop
from poplar.zero.micro_batch_loss import LossFunction, MicroBatchLoss, PassLoss
from poplar.zero.micro_batches import (
    BatchSplitter,
    Loss,
    MicroBatch,
    OpenedStep,
    Weight,
    open_joint_pass,
)
from poplar.zero.optimizers.granularity import Granularity, OptimizerFactory
from poplar.zero.plan_schedule import PlanSchedule
from poplar.zero.setup import (
    BUILDING,
    STRATEGY_CLASSES,
    Request,
    agree_on_request,
    build_engine,
    changed_request,
    changes_units,
    check_choice,
    check_request,
    compare_identities,
    settings_of,
    units_of,
)
from poplar.zero.steps.evaluation import Evaluation
from poplar.zero.steps.nonfinite import OnNonFinite
from poplar.zero.steps.step import Step
from poplar.zero.steps.step_hooks import has_hooks, has_pre_hooks, run_post_hooks, run_pre_hooks
from poplar.zero.steps.step_result import StepResult, Stopwatch
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.steps.step_state import Phase
from poplar.zero.unit import Unit, check_unit_names
from poplar.zero.weights.initial_values import Weights
from poplar.zero.weights.materialization import check_unused, move_to_meta

if TYPE_CHECKING:
    from poplar.checkpoint.training_state import TrainingParts
    from poplar.drift.speed_follower import SpeedFollower
    from poplar.values.profile import ClusterProfile


_LOGGER = logging.getLogger("poplar")


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
    as its backward is over. At stage 0, `.grad` holds the mean gradient of every parameter on every
    rank between the last pass and `step()`. At other stages it is a placeholder then, which raises
    when it is used: torch's `clip_grad_norm_` cannot work on one rank's slices.

    Collective methods, which every rank must call: the constructor, `train_step`, `micro_batches`,
    `clip_grad_norm_`, `step`, `evaluate`, `full_parameters`, `load_state_dict`,
    `consolidate_state_dict`, `full_state_dict`, `save_model`, `apply_plan`, `full_gradients`,
    `follow_drift`, `verify_replicas`, `release`. If a rank fails in one, all ranks raise. Either
    nothing has been applied and training may continue, as after an error of `loss_fn`; or all ranks
    are stopped, and every later call raises the cause, as after an error in the update itself.

    A rank that the plan leaves out (`Plan.left_out`, `is_active`) makes the same calls and gets the
    same results, without a collective in any step: `micro_batches` yields nothing there, other
    calls wait until the active ranks have made theirs, and `state_dict` has no state. Its model is
    current inside `full_parameters()` alone.

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
            require a gradient.
        process_group: default WORLD; NCCL for CUDA, gloo for CPU.
        units: module names, modules or module classes that form the units. Default: repeated
            blocks; all other parameters form the root unit.
        compute_dtype: dtype of the parameters in forward and backward; master values stay fp32.
            "auto": an fp32 model on CUDA computes in bf16 if every rank supports it natively, else
            in fp16 with a loss scale. Any other model is unchanged. bf16 and fp16 also cast the
            floating-point inputs of the model, or of a module of it (outside units, or a unit) that
            `loss_fn` calls directly. `loss_fn` gets its batch unchanged, so targets stay fp32, and
            computes the loss in the dtype that the model returns.
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
            statistics of BatchNorm in training mode, codebooks by moving average, running
            normalizers, `spectral_norm` with unequal passes. Each rank then has its own, and rank
            0's is saved.
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
    _state: Any = None
    # See [Note: ranks that are left out] in `zero.left_out`.
    _left_out: tuple[int, ...] = ()
    _others: LeftOutRanks | None = None
    _follower: SpeedFollower | None = None
    _default_scaler: GradScaler | None = None
    _regroups = 0

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
        def check() -> Request:
            check_choice("on_out_of_memory", on_out_of_memory, OnOutOfMemory)
            check_choice("on_nonfinite", on_nonfinite, OnNonFinite)
            if plan is not None:
                check_class("plan", plan, Plan)
            if isinstance(communicator, Communicator) and plan is not None and plan.left_out:
                raise ValueError(
                    "a communicator object is for all ranks, but the plan leaves some out; pass "
                    "its name"
                )
            return check_request(
                model,
                optimizer_class,
                optimizer_kwargs,
                plan=plan,
                stage=stage,
                params=params,
                units=units,
                compute_dtype=compute_dtype,
                reduce_dtype=reduce_dtype,
                communication=communication,
                world_size=self._group.size,
                allow_forward_state=allow_forward_state,
                default_device=self._group.default_device,
                weights=weights,
                device=device,
                granularity=granularity,
                local=_local,
            )

        building = ExitStack()
        self._model, self._communicator = model, communicator
        self._on_nonfinite, self._allow_forward_state = on_nonfinite, allow_forward_state
        self._retries, self._trains_whole_model = on_out_of_memory == "retry", params is None
        with new_group(process_group, timeout, BUILDING) as self._group, building:
            self._whole = self._group
            self._control = self._whole_control = connect_control(self._group, communicator)
            request = run_on_all_ranks(self._control, check, doing=BUILDING)
            also = {"on_out_of_memory": on_out_of_memory, "on_nonfinite": on_nonfinite}
            dtype = agree_on_request(self._control, request, also=also)
            plan, self._schedule = request.plan, PlanSchedule()
            self._compute_dtype, self._largest_batches = dtype, dict[int, int]()
            if plan is not None and plan.left_out:
                self._left_out, plan = plan.left_out, plan.of_active_ranks()
                request = replace(request, plan=plan)
                has_values = not request.values.on_meta
                others = LeftOutRanks(self._whole, self._left_out, has_values=has_values)
                self._others, self._group = others, others.group
                self._control = connect_control(self._group, communicator)
            self._request, self._plan, self._stage = request, plan, request.stage
            if not self.is_active:
                self._follow_active_ranks()
                return
            if self._others is not None:
                calls = CollectiveCalls(self._whole, _nothing, self._others.announcements)
                building.enter_context(calls.running(BUILDING))
            planned = plan.transport if plan is not None else None
            comm = connect(self._group, communicator, request.device, planned=planned)
            engine, self._update = build_engine(
                request, comm, self._control, dtype, _weak_method(self._check_model)
            )
            # With all settings of their classes, so that no defaults of another class are added.
            super().__init__(self._update.outer_groups(request.groups), {})
            self._settings_are_final = True
            self._train_by(engine)
            self.collective_calls.announce(BUILDING)

    def _train_by(self, engine: Engine) -> None:
        """Train by the first engine of this group of ranks. Local."""
        plan, model, device = self._plan, self._model, engine.trained[0].device
        self.defaults = dict(self._update.inners[0].defaults)
        every_pass = STRATEGY_CLASSES[self._stage].reduces_every_pass
        self._splitter = BatchSplitter(plan, every_pass, self.largest_batches)
        if self._default_scaler is None and self._compute_dtype is torch.float16:
            self._default_scaler = GradScaler(device.type)
        self._checks = StepChecks(
            model,
            self._control,
            looking=0 if plan is None else max(range(plan.world_size), key=plan.samples),
            allow_forward_state=self._allow_forward_state,
            reads=engine.values.are_readable,
            flats=engine.flats,
            strategy=engine.strategy,
        )
        self._use_engine(engine)
        announcements = None if self._others is None else self._others.announcements
        calls = vars(self).get("collective_calls")
        if type(calls) is CollectiveCalls:
            calls.follow(self._group, announcements)
            calls.stop_by(self._step.stop)
        else:
            self.collective_calls = CollectiveCalls(self._group, self._step.stop, announcements)
        groups = self.param_groups
        given = model.parameters() if self._trains_whole_model else _all_parameters(groups)
        self._structure = ModelStructure(model, groups, set(map(id, given)))

    def _use_engine(self, engine: Engine) -> None:
        """Train by this engine, whose flat parameters the update and the checks have. Local."""
        self._engine = engine
        self._state = OptimizerState(engine, self._update)
        self._step = Step(engine, self._update, self._checks, self._on_nonfinite)
        self._step.follow_speeds(self._follower)
        engine.add_changes(ModelState(engine, self._update).register())
        self._unregister = model_checks.register_owner(
            list(self._model.named_parameters()), self, engine.changes
        )

    def _follow_active_ranks(self) -> None:
        """Be the optimizer of a rank that is left out, once the others have built theirs."""
        assert self._others is not None
        with agreed_failures():
            self._left_out_calls().call(BUILDING, _nothing)
        request = self._request
        self._others.prepare_model(request.model, request.device, self._compute_dtype)
        super().__init__(settings_of(request), {})
        self._settings_are_final = True
        self._be_left_out()

    def _left_out_calls(self) -> LeftOutCalls:
        assert self._others is not None
        assert self._others.announcements is not None
        checks = {"evaluate()": _check_no_batches}
        return LeftOutCalls(self._whole, self._others.announcements, checks)

    def _be_left_out(self) -> None:
        """Have no engine, and make the calls of the active ranks. Local."""
        self._opt_called = True  # `train_step` calls no `step` here, of which schedulers would warn
        self._state, self._default_scaler = defaultdict(dict), None
        missing: Any = _NoEngine(
            f"rank {self._whole.rank} is left out by the plan, so it has no state and no current "
            "parameters; call this on the active ranks only (optimizer.is_active)"
        )
        self._engine = self._update = self._step = self._checks = missing
        self._unregister = _nothing
        self.collective_calls = self._left_out_calls()

    @property
    def is_active(self) -> bool:
        """Whether this rank trains; False: the plan leaves it out (`Plan.left_out`)."""
        return self._others is None or self._others.is_active

    @property
    def state(self) -> Any:
        """The state of each parameter, as this rank has it. Set it to an empty dict to reset it."""
        return self._state

    @state.setter
    def state(self, values: Mapping[Any, Any]) -> None:
        if self._state is None:  # in the constructor of the base class
            return
        if values:
            raise ValueError(
                "optimizer.state can only be set to an empty dict, on all ranks, which resets the "
                "state; use load_state_dict() to load one"
            )
        self._update.reset_state()

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

        Without `weight`, one rank calls `loss_fn` again in the first step, for parts of a
        micro-batch and without a forward of the model, and warns if the loss is not their mean.

        Args:
            loss_fn: `loss_fn(model, micro_batch)` -> scalar loss of the micro-batch.
            batch: this rank's part of the global batch: any pytree of tensors, split along dim 0. A
                rank without samples in the plan passes None, or one sample, which is dropped.
            weight: `weight(micro_batch)` -> its weight; default: its number of samples.
            loss: what `loss_fn` returns: the "mean" over what `weight` counts, the "sum", or the
                sum already divided by the global total ("global_mean").
            max_norm: clip the gradient to this norm in the update. At stage 0, `.grad` keeps the
                mean gradient before clipping.
            scaler: loss scaler for fp16; default: an internal one if the model computes in fp16.

        If a rank runs out of memory and smaller micro-batches may fit, `weight` and `loss_fn` are
        called again, for the same samples: see `on_out_of_memory`. What forwards change besides
        gradients, such as buffers and random states, has then changed in the failed passes too.

        Raises:
            RankFailed: another rank failed, so no rank has stepped. If this rank's `loss_fn` fails,
                this rank raises that exception instead.
            torch.OutOfMemoryError: this rank ran out of memory, also on the CPU.
            CollectiveTimeout: a rank did not take part in a collective before the deadline.
        """
        scaler = scaler if scaler is not None else self._default_scaler

        def prepare() -> None:
            nonlocal loss_fn
            if scaler is not None:
                if not isinstance(scaler, GradScaler):
                    raise TypeError(_PLAIN_SCALER)
                scaler.make_scale(self._engine.trained[0].device)
            if weight is None and loss == "mean":
                loss_fn = self._checks.loss.watched(loss_fn)

        def open_passes(again: Callable[[], None] | None) -> tuple[OpenedStep, PassLoss]:
            opened = self._open_step(again or prepare, batch, weight, loss)
            own_loss = self.collective_calls.of_user(loss_fn, "loss_fn")
            return opened, MicroBatchLoss(own_loss, self._model, self._group.rank)

        return self._run_step(open_passes, max_norm, scaler)

    @collective
    def run_joint_pass(
        self,
        forward: PassLoss,
        prepare: Callable[[], None],
        *,
        samples: int,
        max_norm: float | None = None,
    ) -> StepResult:
        """One optimizer step of one pass whose loss all ranks compute together. Collective.

        Internal: programmes call it. The loss of the global batch is the sum over ranks. `forward`
        calls collectives itself, in forward and backward. A rank may be in one of them when others
        start a reduction, so no rank waits for reductions before the end of the pass.

        Args:
            forward: computes this rank's part of the loss; its argument is None.
            prepare: checks this rank's part of the batch; it may raise.
            samples: of this rank in the global batch.
            max_norm: clip the gradient to this norm.
        """
        scaler = self._default_scaler

        def check() -> None:
            self._check_before_step()
            if scaler is not None:
                scaler.make_scale(self._engine.trained[0].device)
            prepare()

        def open_passes(again: Callable[[], None] | None) -> tuple[OpenedStep, PassLoss]:
            return open_joint_pass(self._control, samples, caught(check)), forward

        self._engine.strategy.reductions.allow(len(self._engine.trained) + 1)
        return self._run_step(open_passes, max_norm, scaler)

    def _run_step(
        self,
        open_passes: Callable[[Callable[[], None] | None], tuple[OpenedStep, PassLoss]],
        max_norm: float | None,
        scaler: GradScaler | None,
    ) -> StepResult:
        """One optimizer step. Collective.

        Args:
            open_passes: opens the step and returns the losses of its passes. Its argument is what
                to do before the step is opened again, if memory ran out.
            max_norm: clip the gradient to this norm.
            scaler: loss scaler.
        """
        engine = self._engine
        stopwatch = Stopwatch(engine.strategy.streams, self._group)
        again: Callable[[], None] | None = None
        while True:
            try:
                opened, forward = open_passes(again)
                summary = self._run_passes(forward, opened, max_norm, scaler)
                break
            except MicroBatchesTooLarge as found:
                again = partial(self._use_smaller_batches, found.batches)
        state, timing = engine.step, engine.strategy.timing.step
        if not has_pre_hooks(self):
            state.hide_gradients()
        engine.finish_gradients()
        if scaler is not None:
            scaler.unscale_(self)
        norm = self.clip_grad_norm_(max_norm) if max_norm is not None else None
        if scaler is None:
            self.step()
        else:
            scaler.step(self)
            scaler.update()
        stopwatch.stop()
        return StepResult(
            samples=state.samples,
            waiting_on=summary.waiting_on,
            skipped=state.skipped if isinstance(state.skipped, bool) else state.skipped.read,
            losses=summary.losses,
            norm=norm,
            rank_times=summary.times,
            stopwatch=stopwatch,
            waiting_seconds=lambda: state.waited_to_open + timing.waited_seconds(),
        )

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

        def prepare() -> None:
            if weight is None and loss == "mean":
                self._checks.loss.watch_loop(self._model, batch)

        def begin() -> Step | None:
            with running(left_out=True):
                self._begin_step()
            return self._step if self.is_active else None

        def start() -> list[MicroBatch]:
            return self._step.start(self._open_step(prepare, batch, weight, loss))

        def running(left_out: bool = False) -> AbstractContextManager[None]:
            return self.collective_calls.running("micro_batches()", left_out=left_out)

        return MicroBatchLoop(self._step, start, running, begin)

    @collective
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradient of the step. Collective.

        Gradients that the user has set in `.grad` without a backward are one pass; each rank's have
        weight `1 / ranks`.

        Raises:
            RankFailed: another rank could not finish its passes, so no rank has stepped.
            RuntimeError: no backward since the last step, or a plain `torch.amp.GradScaler`.
        """
        name = f"Optimizer.step#{type(self).__name__}.step"
        with torch.autograd.profiler.record_function(name):
            return self._step_with_hooks(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch does not run the hooks around it

    def _step_with_hooks(self, closure: Any) -> float | None:
        def before() -> None:
            nonlocal closure
            closure = run_pre_hooks(self, closure)
            if hasattr(self, "found_inf"):  # set by torch's GradScaler.step, but not by Poplar's
                for name in ("found_inf", "grad_scale"):
                    vars(self).pop(name, None)
                raise RuntimeError(_PLAIN_SCALER)

        error, result = caught(before), None
        if error is None and closure is not None:
            try:
                with torch.enable_grad():
                    result = closure()
            except Exception as failure:
                state = self._engine.step
                if state.in_user_loop or state.phase is Phase.ABANDONED:
                    agreed(failure)  # the loop over micro-batches reports it
                raise
        if error is None and self._step.is_zero(self.param_groups):
            return result
        summary = self._step.apply(self.param_groups, self._settings(), error)
        self._update.copy_new_settings(self.param_groups)
        if not self._schedule.in_step:  # of a loop without micro-batches
            self._schedule.begin_step()
            self._follow_schedule(in_step=True)
        self._schedule.end_step()
        self._optimizer_step_code()
        error = caught(partial(run_post_hooks, self, closure))
        if summary.has_hooks:
            doing, outcome = (
                "a hook after a step",
                "it raises, too, after all have applied the step",
            )
            raise_on_any_error(self._control, error, doing=doing, outcome=outcome)
        elif error is not None:
            raise error
        self._step.report(summary)
        return result

    def _settings(
        self,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale: Tensor | None = None,
    ) -> StepSettings:
        """What must be equal on all ranks in this step."""
        return StepSettings(
            self.param_groups,
            updates=self._update.updates,
            max_norm=max_norm,
            norm_type=norm_type,
            scale=scale,
            has_hooks=has_hooks(self),
        )

    @collective
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the full gradient so that its norm is at most `max_norm`. Collective.

        Returns:
            The norm over all parameters before clipping, as one fp32 on the device. For `norm_type`
            2 and infinity its bits do not depend on the shares.
        """
        settings = self._settings(max_norm=max_norm, norm_type=float(norm_type))
        return self._step.clip(float(max_norm), settings)

    @collective
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step. `.grad` is always set to None.

        Raises:
            RuntimeError: called inside of a `micro_batches` loop, before its last backward was
                applied. The step is abandoned on all ranks.
        """
        if self._step.leave_user_loop(_ZERO_GRAD_INSIDE_LOOP):
            raise agreed(RuntimeError(_ZERO_GRAD_INSIDE_LOOP))
        self._engine.drop_parameter_gradients()
        if self._engine.step.open_micro_batch is None:
            self._engine.hooks.drop_implicit_pass()
            if self._engine.has_gradients:
                self._engine.begin_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backwards outside `micro_batches` that are not the last of their step."""
        if not self.is_active:
            yield
            return
        before = self._engine.hooks.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._engine.hooks.set_requires_gradient_sync(before)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Like `no_sync`, without a context; as in FSDP2."""
        if self.is_active:
            self._engine.hooks.set_requires_gradient_sync(requires_gradient_sync)

    @collective
    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The full mean gradient of every trained parameter, by name. Collective.

        Call it between the last backward and `step()`. Every rank gets all gradients, in fp32 and
        in the shape of the parameters, so it needs memory for all of them.
        """
        engine = self._engine
        self._step.reject_open_loop()

        def prepare() -> list[Tensor]:
            self._step.finish_passes()
            return engine.empty_gradients()

        memory = run_on_all_ranks(self._control, prepare, doing="full_gradients()")
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

        def prepare() -> None:
            for flat in self._engine.trained:
                self._update.take_written_values(flat)

        self._checks.replicas.verify(prepare)

    def trace(self) -> AbstractContextManager[list[Span]]:
        """A context that records this rank's passes, waits and updates as spans.

        With NCCL they are times of the device, and the context waits for it at its end.
        """
        return self._group.trace.record()

    @collective
    def release(self, values: bool = True) -> None:
        """Detach the optimizer from the model. Collective.

        Every parameter gets its own memory with its current value, in the dtype in which the model
        computes. Hooks are removed and `.grad` is None. This optimizer cannot be used any more, but
        another one, for example at another stage, can take the model.

        Args:
            values: False drops the values and puts the parameters on `meta`: nothing is unsharded.
                Buffers keep their values.

        Raises:
            RuntimeError: called in the middle of a step, or, with `values=False`, while a loss or
                an output exists whose graph holds parameters.
        """
        engine = self._engine

        def check() -> None:
            if engine.has_gradients or engine.scheduler.active:
                raise RuntimeError("release() in the middle of a step; call it after step()")
            if not values:
                if any(unit.opaque for unit in engine.units):
                    raise RuntimeError(
                        "release(values=False) would lose quantised parameters, which nothing "
                        "initializes again; use release()"
                    )
                check_unused(self._model.parameters())

        run_on_all_ranks(self._control, check, doing="release()")
        if not values:
            self._detach()
            move_to_meta(list(self._model.parameters()))
            return
        self._send_masters()
        parameters = [p for flat in engine.flats for p in flat.parameters]

        opaque = [opaque for unit in engine.units for opaque in unit.opaque]

        def copy_all() -> tuple[list[Tensor], list[Tensor]]:
            copies = [parameter.detach().clone() for parameter in parameters]
            return copies, [each.values.clone() for each in opaque]

        with engine.values.unsharded(writeback=False):
            copies, frozen = run_on_all_ranks(self._control, copy_all, doing="release()")
        self._detach()
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = None
            parameter.data = copy
        for each, bytes_of_all in zip(opaque, frozen, strict=True):
            each.use_values(bytes_of_all, lasting=True)
            each.attach_parameters()

    def _detach(self) -> None:
        """Drop the model and the engine without changing the parameters."""
        self._unregister()
        for parameter in self._model.parameters():
            mark_present(parameter)
        self._state = defaultdict(dict)
        # All of them lead to the state, which must not live as long as this object.
        released: Any = _NoEngine("this optimizer has released its model; build a new one")
        self._engine = self._update = self._step = self._checks = released
        self.collective_calls = released

    # Without a step.

    @collective
    @torch.no_grad()
    def evaluate(
        self, loss_fn: LossFunction, loader: Iterable[Any], weight: Weight | None = None
    ) -> float:
        """Exact mean loss over the batches of all ranks, in eval mode. Collective.

        Ranks may have different numbers of batches, or none; one that is left out must have none.

        Args:
            loss_fn: as for `train_step`; it returns a mean.
            loader: this rank's batches.
            weight: as for `train_step`.

        Raises:
            RankFailed: another rank could not load or evaluate a batch.
            ValueError: no rank had a batch.
        """
        self._step.nonfinite.raise_if_found()
        own_loss = self.collective_calls.of_user(loss_fn, "loss_fn")
        mean = Evaluation(self._engine, own_loss, weight).run(loader)
        self._schedule.end_evaluation()
        return mean

    def full_parameters(
        self, writeback: bool = False, *, modules: Sequence[str | nn.Module] | None = None
    ) -> AbstractContextManager[None]:
        """A context in which parameters are unsharded on every rank. Collective at both ends.

        Inside, `copy.deepcopy(model)` makes a plain model that the optimizer does not know. What is
        kept of the parameters, such as `model.state_dict()`, keeps its values and its memory after
        the context, at stage 3; elsewhere it is the memory of the model, as in torch. Where updates
        are sent as compressed differences, all ranks get the exact values first.

        Args:
            writeback: keep values that are written into the parameters (equal on all ranks), for
                example by `model.load_state_dict`; otherwise changes are lost at stage 3.
            modules: unshard only the units that have parameters of these modules of the model, or
                of modules with these names. Default: all.

        Raises:
            ValueError: the model has no such module, or ranks pass different ones.
        """
        return self._full_parameters(writeback, modules)

    @contextmanager
    def _full_parameters(
        self, writeback: bool, modules: Sequence[str | nn.Module] | None
    ) -> Iterator[None]:
        engine, others, name = self._engine, self._others, "full_parameters()"
        if others is not None and not others.is_active:
            calls: CollectiveCalls = self.collective_calls
            names: Any = calls.call(name, _nothing)
            others.share_values(self._model, names.splitlines())
            yield
            return
        strategy = engine.strategy
        is_local = not strategy.shards_parameters and not strategy.sends_differences
        communicates = modules is not None or others is not None or not is_local

        def running(*, begins: bool) -> AbstractContextManager[None]:
            if not communicates:
                return nullcontext()
            return self.collective_calls.running(name, begins=begins)

        with ExitStack() as stack:
            with running(begins=True):
                self._step.nonfinite.raise_if_found()
                units = engine.values.agreed_units(modules) if communicates else engine.units
                self._send_masters()
                stack.enter_context(engine.values.unsharded(writeback=writeback, units=units))
                if others is not None:
                    names = self._readable_names(units, whole=modules is None)
                    self.collective_calls.announce(name, "\n".join(names))
                    others.share_values(self._model, names)
            try:
                yield
            finally:
                with running(begins=False):
                    stack.close()
                    for flat in (flat for unit in units for flat in unit.trained if writeback):
                        self._update.refresh(flat)

    def _send_masters(self) -> None:
        """Give all ranks the fp32 values, if they compute with others. Collective then."""
        from poplar.checkpoint.plan_change import send_masters

        if self._engine.strategy.sends_differences:
            send_masters(self._engine, self._update)

    def _readable_names(self, units: Sequence[Unit], *, whole: bool) -> list[str]:
        """Names of the parameters of units and, of the whole model, of all others and buffers."""
        if not whole:
            return [name for unit in units for flat in unit.flats for name in flat.names]
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return [name for name, tensor in named if tensor.numel()]

    @property
    def control(self) -> Control:
        """The channel for small values of all ranks; for integrations."""
        return self._control

    @property
    def plan(self) -> Plan | None:
        """The current plan; None without one."""
        return self._plan.beside(self._left_out) if self._plan is not None else None

    @property
    def pending_plan(self) -> Plan | None:
        """The plan to which `apply_plan` changes at a later step; None if there is none."""
        return self._schedule.latest

    @property
    def largest_batches(self) -> dict[int, int]:
        """By rank, the largest micro-batch to which running out of memory has reduced it.

        Equal on all ranks. `profile.with_largest_batches(optimizer.largest_batches)` makes plans
        that respect it.
        """
        return dict(self._largest_batches)

    def memory(self) -> HeldMemory:
        """Bytes that this rank holds now, by kind, beside its peak and the plan's prediction."""
        prediction = (self._plan.prediction if self._plan is not None else None) or {}
        predicted = prediction.get("memory_bytes")
        return held_memory(
            self._engine,
            self._update,
            predicted=None if predicted is None else int(predicted[self._group.rank]),
        )

    @property
    def steps(self) -> int:
        """Steps that have begun: calls of `train_step` and loops of `micro_batches`.

        In loops that use neither, calls of `step`.
        """
        return self._schedule.steps

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
        The ranks that are left out make the call, too. `follow_drift` ends then, and a scaler of
        the user has on a rank that comes back what it had there.

        The logger "poplar" reports the seconds, and `trace` has a span.

        The `HeteroBatchSampler` from which the batches of the steps come follows at the same step,
        and its global batches stay the same. `DataLoader` workers draw batches ahead, which belong
        to the plan of now. So the plan takes effect after the batches that any rank has drawn. A
        stream (`split_stream`) follows if no workers read it.

        Args:
            plan: the new plan, the same on all ranks.
            at_step: the number of the step from which on the plan is in force, counted as `steps`;
                default: the first possible one.

        Returns:
            That number. If it is `steps`, the next step's, the plan is in force now.

        Raises:
            ValueError: the plan has another world size or factors other layers, the optimizer class
                does not support its stage, `at_step` is too early, or ranks pass different plans.
            RuntimeError: called in the middle of a step, or inside `full_parameters()`.
            CollectiveTimeout: a rank did not make the call before the deadline. A rank that is left
                out, now or by the plan, is needed only if the plan leaves out other ranks.
        """
        what = "apply_plan()"

        def check() -> tuple[dict[str, Any], int, int]:
            check_class("plan", plan, Plan)
            request, _ = self._prepared_change(plan, self._whole.size)
            identity = {
                **request.change_identity(),
                "ranks that the plan leaves out": plan.left_out,
                "argument at_step": at_step,
                "number of steps that have begun": self.steps,
            }
            return identity, self._schedule.first_step(plan), self._schedule.changes

        others = self._others
        if self.is_active:
            received = exchange_results(self._control, check, what=what)
            compare_identities([identity for identity, *_ in received])
        if others is not None and self._needs_left_out(plan):
            self.collective_calls.let_all_run(what if self.is_active else "")
            steps = self._whole_control.exchange_objects(self.steps, what=what)
            self._schedule.count_from(steps[others.first])
            received = exchange_results(self._whole_control, check, what=what)
            compare_identities([identity for identity, *_ in received])
        by_rank = [first for _, first, _ in received]
        step = max(by_rank) if at_step is None else at_step
        if step < max(by_rank):
            raise agreed(
                ValueError(
                    f"apply_plan(at_step={step}): {self.steps} steps have begun, and batches of "
                    f"the plan of now have been drawn up to the steps before {by_rank} by rank; "
                    f"pass at_step={max(by_rank)} or later, or None for the first possible step"
                )
            )
        self._schedule.add(step, plan, max(changes for *_, changes in received))
        self._follow_schedule()
        return step

    def _needs_left_out(self, plan: Plan) -> bool:
        """Whether the plan, or one that it may replace, leaves out other ranks than now."""
        plans = (plan, *self._schedule.plans)
        return not self.is_active or any(each.left_out != self._left_out for each in plans)

    def _follow_schedule(self, *, in_step: bool = False) -> None:
        """Change to the plan of the next step, if it is another one. Collective then.

        Args:
            in_step: only the active ranks make this call.
        """
        while (plan := self._schedule.due()) is not None:
            began = time.perf_counter()
            if plan.left_out != self._left_out:
                if in_step:
                    raise agreed(RuntimeError(_RANKS_CHANGE_OUTSIDE))
                self.collective_calls.let_all_run()
                self._change_active_ranks(plan)
            elif self.is_active:
                self._change_plan(plan)
            else:
                self._plan = plan.of_active_ranks()
            self._group.trace.add("optimizer", "the change to another plan", began)
            if self._group.rank == 0 and self.is_active:
                seconds = time.perf_counter() - began
                _LOGGER.info("step %d: changed to another plan in %.3f s", self.steps, seconds)

    def _change_active_ranks(self, plan: Plan) -> None:
        """Change to a plan that leaves out other ranks. Collective over all ranks.

        [Note: change of ranks] State moves within one group: of the ranks that were active and
        those that will be. First the ranks that come back join it, without a share. Then the shares
        are those of the new plan. Last, the ranks that have none any more leave. What is
        replicated, at stage 0, is divided before, so that what joins needs no state.
        """
        now = [rank for rank in range(self._whole.size) if rank not in self._left_out]
        union = sorted({*now, *plan.active_ranks})
        joining = len(union) > len(now)

        def check() -> None:
            if self.is_active:
                self._step.nonfinite.raise_if_found()
                self._prepared_change(plan)
                if self._request.values.on_meta and self._whole.rank in plan.left_out:
                    check_unused(self._model.parameters())

        run_on_all_ranks(self._whole_control, check, doing="apply_plan()")
        if self.is_active:
            self._send_masters()
        divides = self.is_active and self._stage == 0
        if divides and (joining or not self._engine.strategy.updates_agree):
            self._change_plan(state_plan(plan, now, 1, even=True))
        if joining:
            self._regroup(union, plan)
        if len(union) > len(plan.active_ranks):
            if self.is_active and self._stage > 0:
                self._change_plan(state_plan(plan, union, self._stage))
            self._regroup(plan.active_ranks, plan)
        if self.is_active:
            self._change_plan(plan)
        else:
            self._plan = plan.of_active_ranks()

    def _regroup(self, ranks: Sequence[int], plan: Plan) -> None:
        """Let these ranks train, of which those that do now have all state. Collective over all.

        Args:
            ranks: either some of those that train now, or all of these and others.
            plan: that comes next, of all ranks.
        """
        from poplar.checkpoint.changed_ranks import leave_engine, regroup_engine

        whole, request, before = self._whole, self._request, self._left_out
        was_active, old, update = self.is_active, self._engine, self._update
        self._left_out = tuple(rank for rank in range(whole.size) if rank not in ranks)
        self._others, self._regroups = None, self._regroups + 1
        if self._follower is not None:
            self._follower = None
            _LOGGER.warning("follow_drift() has ended: other ranks train now; call it again")
        if self._left_out:
            has_values = not request.values.on_meta
            self._others = LeftOutRanks(
                whole, self._left_out, has_values=has_values, number=self._regroups
            )
        self._group = whole if self._others is None else self._others.group
        self._control = connect_control(self._group, self._communicator)
        self._unregister()
        if not self.is_active:
            if was_active:
                leave_engine(old, on_meta=request.values.on_meta)
                self.collective_calls.follow(whole, None)
            self._be_left_out()
            return
        joining = [at for at, rank in enumerate(ranks) if rank in before]
        sender = next(at for at in range(len(ranks)) if at not in joining)
        own = self._common_state() if was_active else None
        common = self._control.exchange_objects(own, what="apply_plan()")[sender]
        assert common is not None
        self._stage = common.stage
        choice = self._communicator
        comm = connect(self._group, choice, request.device, planned=common.transport)
        self._plan = state_plan(plan, ranks, self._stage, even=True)
        sent = self._plan.communication
        self._request = replace(request, plan=self._plan, stage=self._stage, communication=sent)
        engine, self._update = regroup_engine(
            old if was_active else None,
            update if was_active else None,
            self._request,
            comm,
            self._control,
            self._compute_dtype,
            _weak_method(self._check_model),
            joining=joining,
            sender=sender,
        )
        self._train_by(engine)
        if not was_active:
            self._take_common_state(common)

    def _common_state(self) -> _CommonState:
        """What is equal on all active ranks, and a rank that comes back needs."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.param_groups
        ]
        return _CommonState(
            stage=self._stage,
            transport=None if self._plan is None else self._plan.transport,
            updates=self._update.updates,
            groups=groups,
            largest_batches=self._largest_batches,
            scaler=None if self._default_scaler is None else self._default_scaler.state_dict(),
        )

    def _take_common_state(self, common: _CommonState) -> None:
        for group, settings in zip(self.param_groups, common.groups, strict=True):
            group.update(settings)
        self._update.count_from(common.updates)
        self._largest_batches = dict(common.largest_batches)
        self._splitter = replace(self._splitter, largest_batches=self.largest_batches)
        if self._default_scaler is not None and common.scaler is not None:
            self._default_scaler.load_state_dict(common.scaler)

    def _change_plan(self, plan: Plan) -> None:
        """Change to another plan that has been checked on all ranks. Collective."""
        from poplar.checkpoint.plan_change import follow_plan, replace_engine

        request, units = self._prepared_change(plan)
        plan = plan.of_active_ranks()
        self._step.nonfinite.raise_if_found()
        if units:
            self._unregister()
            check_step, dtype = _weak_method(self._check_model), self._compute_dtype
            engine = replace_engine(self._engine, self._update, request, units, dtype, check_step)
            self._checks.follow(engine.flats, engine.strategy, reads=engine.values.are_readable)
            self._use_engine(engine)
            self.collective_calls.stop_by(self._step.stop)
        else:
            follow_plan(self._engine, self._update, plan)
        self._request, self._stage, self._plan = request, request.stage, plan
        every_pass = STRATEGY_CLASSES[request.stage].reduces_every_pass
        self._splitter = replace(self._splitter, plan=plan, synchronizes_every_pass=every_pass)

    def _prepared_change(
        self, plan: Plan, world_size: int | None = None
    ) -> tuple[Request, list[Unit]]:
        """The request of another plan, and its units if they are not those of now. Local.

        Args:
            plan: of all ranks, or of the active ones.
            world_size: for how many ranks it must be; None: that is known.
        """
        engine, old = self._engine, self._request
        if world_size is not None and plan.left_out != self._left_out:
            self._check_change_of_ranks()
        request = changed_request(old, plan, world_size or plan.world_size)
        if not self.is_active:
            return request, []
        if engine.has_gradients or engine.scheduler.active:
            raise RuntimeError("apply_plan() in the middle of a step; call it after step()")
        if engine.values.present:
            raise RuntimeError("apply_plan() inside full_parameters(); leave that context first")
        units: list[Unit] = []
        if changes_units(old, request):
            sharded = STRATEGY_CLASSES[request.stage].shards_parameters
            if sharded and any(unit.opaque for unit in engine.units):
                raise ValueError(
                    "apply_plan cannot give units shares of their own if quantised parameters are "
                    "sharded; leave these shares out, or build a new optimizer for this plan"
                )
            given = self._control, self._compute_dtype
            units = units_of(request, *given, shards_parameters=sharded)
        check_unit_names(plan, units or engine.units, request.unit_names)
        return request, units

    def _check_change_of_ranks(self) -> None:
        """Check that other ranks can be left out. Local."""
        if isinstance(self._communicator, Communicator):
            raise ValueError(
                "apply_plan cannot leave out other ranks with a communicator object, which is for "
                "the ranks of now; build the optimizer with the name of a communicator"
            )
        if self._request.local:
            raise ValueError("apply_plan cannot leave out other ranks with local parameters")
        if self.is_active and any(unit.opaque for unit in self._engine.units):
            raise ValueError(
                "apply_plan cannot leave out other ranks while quantised parameters are sharded "
                "(stage 3); apply a plan of stage 2 first, or build a new optimizer for this plan"
            )

    @collective
    def follow_drift(
        self,
        profile: ClusterProfile,
        *,
        replan: Literal["auto", "advise", "off"] = "advise",
        steps: int | None = None,
    ) -> SpeedFollower | None:
        """Notice ranks that become slower or faster while training, and plan again. Collective.

            tuned = poplar.tune(model, loss_fn, example_batch, global_batch=512, lr=3e-4)
            optimizer = HeteroZeroOptimizer(model, torch.optim.AdamW, plan=tuned.plan, lr=3e-4)
            optimizer.follow_drift(tuned.profile)

        From then on, every step, by `train_step` or `micro_batches`, compares the compute seconds
        of each rank with its profile, for the samples and lengths of the step. If a speed has
        changed and another plan of the same stage and global batch is faster by more than moving
        the state costs, the first rank logs one line to the logger "poplar". Single slow steps and
        long samples are no change.

        Args:
            profile: of these ranks, the same on all of them.
            replan: "advise": only report; the plan is `plan` of the result. "auto": apply the plan
                by `apply_plan`, whose sampler follows. "off": stop following.
            steps: that are left to train; default: a plan must pay for itself within 1000.

        Returns:
            What it has found so far; None if it is off, or on a rank that the plan leaves out.

        Raises:
            ValueError: the optimizer has no plan, the profile is of other ranks, or ranks differ.
        """
        from poplar.drift.speed_follower import SpeedFollower
        from poplar.planner.prediction import predict
        from poplar.values.profile import ClusterProfile

        def checked() -> tuple[ClusterProfile, str, int | None]:
            check_choice("replan", replan, Literal["auto", "advise", "off"])
            check_class("profile", profile, ClusterProfile)
            if self.plan is None:
                raise ValueError("follow_drift() needs an optimizer that was built with a plan")
            predict(profile, self.plan)  # raises if it is of other ranks or another model
            return profile, replan, steps

        arguments = exchange_results(self._control, checked, what="follow_drift()")
        if any(other != arguments[0] for other in arguments):
            raise agreed(
                ValueError(
                    "the ranks passed different arguments to follow_drift(); pass the profile of "
                    "the first rank, and the same replan and steps, on all ranks"
                )
            )
        self._follower = None
        if replan != "off":
            device, applies = self._engine.trained[0].device, replan == "auto"
            self._follower = SpeedFollower(self, profile, device, applies=applies, steps=steps)
        self._step.follow_speeds(self._follower)
        return self._follower

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, as views and without communication.

        State with one value per element is a `ShardTensor` of the elements that this rank owns; at
        stage 0 it is a plain tensor. `torch.save` stores these parts, for a rank that owns no other
        elements. `torch.distributed.checkpoint` also loads them under another plan, and torch's
        `get_state_dict` gives the names: see `OptimizerState` for what is in them.

        After `consolidate_state_dict(to)`, on rank `to` and until the next step or load, it is the
        whole state.
        """
        if not self.is_active:
            return super().state_dict()
        self._step.nonfinite.raise_here()
        if self._update.collected is not None:
            return collected_state_dict(self, self._update.collected)
        state = super().state_dict()
        if self._default_scaler is not None:
            state["poplar"] = {"scaler": self._default_scaler.state_dict()}
        return state

    @collective
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state. Collective; nothing changes if it fails on a rank.

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

        scaler, changing = self._default_scaler, self.collective_calls.changing_values
        load_state_dict(self, self._engine, self._update, state_dict, scaler, changing)

    @collective
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on rank `to`, for `state_dict()` there. Collective.

        It stays there, in CPU memory, until the next step or load; as that of torch's
        `ZeroRedundancyOptimizer`.
        """
        self._update.keep_collected(self.full_state_dict(to))

    @collective
    def full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The whole state, for a plain `optimizer_class` with the same param groups. Collective.

        It has the state of one flat parameter at a time on the device. The param groups have the
        names of the parameters (`param_names`). If parameters are not fp32, `master` is their fp32
        value.

        Returns:
            On rank `to` a state dict on the CPU; None on other ranks.

        Raises:
            ValueError: there is no rank `to`.
        """
        from poplar.checkpoint.sharded_state import full_state_dict

        self._step.nonfinite.raise_if_found()
        state = full_state_dict(self, self._engine, self._update, self._active_number(to))
        if state is not None and self._default_scaler is not None:
            state["poplar"] = {"scaler": self._default_scaler.state_dict()}
        return state

    def _active_number(self, rank: int) -> int:
        """The number of an active rank in the group of the active ranks."""
        if not self._left_out:
            return rank
        if rank in self._left_out:
            raise agreed(ValueError(f"rank {rank} is left out by the plan, so it gets no state"))
        return rank - sum(other < rank for other in self._left_out)

    def _training_parts(self) -> TrainingParts:
        """What the state of this optimizer consists of; `poplar.save_checkpoint` calls it."""
        from poplar.checkpoint.training_state import TrainingParts

        self._refuse_local("save_checkpoint() and load_checkpoint()")
        return TrainingParts(
            engine=self._engine,
            update=self._update,
            optimizer=self,
            stage=self._stage,
            plan=self._plan,
            scaler=self._default_scaler,
            reject_nonfinite=self._step.nonfinite.reject_state,
        )

    @collective
    def save_model(
        self, path: str | Path, *, sharded: bool = False, frozen: bool | None = None
    ) -> None:
        """Write the full weights as safetensors. Collective.

        No rank holds more than its share and one unit. A file gets its name when it is complete.
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
        self._step.nonfinite.reject_state("save_model()")
        self._send_masters()
        given = self._engine, self._control, self._model, Path(path)
        save_model(*given, sharded=sharded, frozen=frozen)

    def _refuse_local(self, doing: str) -> None:
        local = [name for flat in self._engine.flats if flat.is_local for name in flat.names]
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

    # The parts of a step.

    def _run_passes(
        self,
        forward: PassLoss,
        opened: OpenedStep,
        max_norm: float | None,
        scaler: GradScaler | None,
    ) -> StepSummary:
        """Run the passes of an opened step and close it. Collective.

        Raises:
            MicroBatchesTooLarge: ranks ran out of memory, and smaller micro-batches may fit.
        """
        step = self._step
        early = step.run_early_forward(opened, forward)
        error = step.run_passes(step.start(opened, early), forward, scaler, early)
        self._engine.wait_for_reductions()
        scale = None if scaler is None else scaler.make_scale(self._engine.trained[0].device)
        settings = self._settings(max_norm=max_norm, scale=scale)
        try:
            return step.close(settings, error, may_run_again=self._retries)
        except MicroBatchesTooLarge:
            if error is not None:
                free_frames(error)  # they hold the batch, or activations if the leader failed
            raise

    def _open_step(
        self, prepare: Callable[[], None], batch: Any, weight: Weight | None, loss: Loss
    ) -> OpenedStep:
        """Check and split the batch and start to exchange its weight. Collective.

        Args:
            prepare: what else may fail on this rank before the step.
            batch: as for `train_step`.
            weight: as for `train_step`.
            loss: as for `train_step`.
        """

        def check() -> None:
            self._check_before_step()
            prepare()
            self._checks.batches.look_at_lengths(batch)

        error = caught(check)
        version = self._schedule.version
        return self._splitter.open(self._control, batch, weight, loss, error, version)

    def _begin_step(self) -> None:
        """Change to the plan of a step that begins, and count it. Collective if the plan changes.

        Inside of another step, which raises when this one is opened, the plan stays.
        """
        engine = self._engine
        if not self.is_active:
            self._follow_schedule()
        elif self._schedule.is_due and not (self._step.has_open_loop or engine.values.present):
            engine.hooks.drop_implicit_pass()
            if engine.has_gradients:  # which were not applied
                engine.begin_step()
            self._follow_schedule()
        self._schedule.begin_step()

    def _check_before_step(self) -> None:
        if self._engine.values.has_unsharded:
            raise RuntimeError(
                "a step was started inside full_parameters(); leave that context first"
            )
        self._engine.hooks.drop_implicit_pass()
        if self._step.leave_user_loop(_STEP_INSIDE_LOOP) or self._engine.scheduler.active:
            raise RuntimeError(_STEP_INSIDE_LOOP)
        self._checks.check_mode()
        if Phase.ACCUMULATED <= self._engine.step.phase <= Phase.FINAL and self._group.rank == 0:
            warnings.warn(
                "a step begins, and the gradients of the last one are dropped, because they were "
                "not applied; call optimizer.step() after the micro_batches loop, or "
                "optimizer.zero_grad() to drop them without this warning",
                stacklevel=4,
            )
        self._check_model()

    def _expect_loss(self, loss_fn: LossFunction, where: str) -> None:
        """Check the first batch of `micro_batches` with this loss function; for integrations.

        Args:
            loss_fn: as for `train_step`.
            where: where the user passes `weight=`, for a warning.
        """
        self._checks.loss.expect(loss_fn, where)

    def _expect_artificial_data(self) -> None:
        """Do not warn of the data and the mode of the model in the first step; for measurements."""
        if self.is_active:
            self._checks.expect_artificial_data()

    def _check_model(self) -> None:
        """Check, before a step, that the optimizer still trains what it was built for."""
        self._checks.check_structure(self._structure, self.param_groups)
        self._update.adopt_replaced_data(self._engine.flats)

    def _use_smaller_batches(self, too_large: Mapping[int, int]) -> None:
        """Halve micro-batches that did not fit, for this step and later ones. Equal on all ranks.

        Args:
            too_large: by rank, the samples of a micro-batch that did not fit.
        """
        limits = {rank: batch // 2 for rank, batch in too_large.items()}
        for rank, most in limits.items():
            self._largest_batches[rank] = min(most, self._largest_batches.get(rank, most))
        if self._plan is not None:
            self._plan = self._plan.with_largest_batches(limits)
        known = self.largest_batches
        self._splitter = replace(self._splitter, plan=self._plan, largest_batches=known)
        free_cached_memory(self._engine.trained[0].device)
        if self._group.rank == 0 or self._group.rank in limits:
            warnings.warn(smaller_batches_message(too_large), stacklevel=3)

    @collective
    @torch.no_grad()
    def _multiply_gradient(self, factor: Tensor) -> Tensor:
        """Multiply the gradient in the update; for loss scaling. Collective.

        Args:
            factor: a one-element tensor; the host does not synchronize.

        Returns:
            One fp32, equal on all ranks: 1 if the gradient is not finite, so that `step` changes
            nothing, else 0.
        """
        return self._step.multiply_gradient(factor, self._settings(scale=factor))


def _weak_method(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method while its object exists, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call


def _all_parameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
    return (parameter for group in groups for parameter in group["params"])


@dataclass(frozen=True, kw_only=True)
class _CommonState:
    """What is equal on all active ranks, beside parameters and the state of their elements."""

    stage: int
    transport: str | None
    updates: int
    groups: list[dict[str, Any]]
    """The settings of the param groups."""
    largest_batches: dict[int, int]
    scaler: dict[str, Any] | None


class _NoEngine:
    """Replaces the engine after `release`, and on a rank that is left out."""

    def __init__(self, why: str) -> None:
        self.__dict__["why"] = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.why)


def _check_no_batches(
    _: object, loss_fn: LossFunction, loader: Iterable[Any], weight: Weight | None = None
) -> None:
    """Check, for `evaluate` on a rank that is left out, that it has no batches."""
    if next(iter(loader), None) is not None:
        raise ValueError(
            "evaluate() on a rank that the plan leaves out, whose batches nobody evaluates; divide "
            "the data among plan.active_ranks, and pass an empty loader here"
        )


def _nothing(*_: Any) -> None:
    """Does nothing."""


_STEP_INSIDE_LOOP = (
    "a step was started inside of the micro_batches loop of another step, which is now abandoned "
    "on all ranks; end the loop first. After an exception in its body that you handle, use `with "
    "optimizer.micro_batches(batch) as micro_batches:`, which ends it"
)

_RANKS_CHANGE_OUTSIDE = (
    "a plan that leaves out other ranks is due, but step() is called without train_step() or "
    "micro_batches(), where it would take effect. The step was applied, with the plan of before; "
    "use one of them, or apply the plan when no DataLoader worker has drawn batches ahead"
)

_ZERO_GRAD_INSIDE_LOOP = (
    "zero_grad() inside of the micro_batches loop, whose step is now abandoned on all ranks; the "
    "passes of the loop add up to one step, so call it after step()"
)

_PLAIN_SCALER = (
    "torch.amp.GradScaler reads .grad on each rank alone, but the gradients are sharded and all "
    "ranks must skip a step together; use poplar.GradScaler, with the same arguments"
)
