"""Unequal micro-batches and numbers of passes in engines that average gradients over ranks.

The engine keeps parameters, gradients and optimizer. A pass is weighted by a factor of its loss, so
that the engine's mean over ranks is the gradient of the mean loss of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.comm import connect_control
from poplar.comm.failure_reports import StoreUnavailable
from poplar.comm.point_to_point import close_when_aborted
from poplar.data import pytree
from poplar.integrations.own_dtype import own_dtype
from poplar.integrations.user_step import LOOP, UserStep, outside_of_the_loop
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.tuning.autotune import autotune
from poplar.values.communication import EXACT
from poplar.values.errors import CollectiveTimeout, agreed, check_class, is_agreed
from poplar.values.plan import STRATEGIES, Plan
from poplar.zero.agreement import caught, exchange_results
from poplar.zero.checks.model_checks import reject_embeddings_by_micro_batch
from poplar.zero.checks.step_checks import StepChecks
from poplar.zero.collective_calls import (
    CollectiveCalls,
    collective,
    new_group,
    stop_reason,
    waiting_in,
)
from poplar.zero.micro_batch_loop import MicroBatchLoop
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import BatchSplitter, Loss, MicroBatch, Weight

_CARRIED_OUT = frozenset(
    ("stage", "global_batch", "micro_batches", "shares", "left_out", "transport", "prediction")
)
"""Fields of `Plan` that these engines carry out, that have a check of their own, or that do not
change the gradient. All others are settings of Poplar's own engine: they must be left out."""
_ONLY_WITH = {"policy": "even_shares", "communication": "exact"}
"""Arguments of `poplar.autotune` that have one value here: others make plans with settings that
these engines do not carry out."""


class UnequalPasses:
    """Runs this rank's passes of a plan in a loop that the user owns. See the subclasses."""

    stages: tuple[int, ...]
    """Stages of the plans that the engine can run."""
    engine: str
    """The engine's name in messages."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        allow_forward_state: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self._called = model
        self._model: Any = getattr(model, "_orig_mod", model)  # as torch.compile returns it
        with new_group(self._process_group(), timeout, "UnequalPasses()") as self._group:
            self.collective_calls = CollectiveCalls(self._group, self._stop)
            self._control = connect_control(self._group)
            close_when_aborted(self._group, self._group.process_group)
            self._plan = self._agreed_plan(plan, allow_forward_state)
            self._splitter = BatchSplitter(plan, plan.synchronizes_every_pass)
            self._checks = StepChecks(
                self._inner_model(),
                self._control,
                looking=max(range(plan.world_size), key=plan.samples),
                allow_forward_state=allow_forward_state,
            )
            self._step: UserStep | None = None
            """The current one."""
            self._loss: Tensor | float = math.nan
            """This rank's part of the loss of the last one."""

    @property
    def plan(self) -> Plan:
        """The plan that is run."""
        return self._plan

    # What an engine defines.

    def _process_group(self) -> dist.ProcessGroup:
        """The ranks over which the engine averages gradients; raises if it has not the model."""
        raise NotImplementedError

    def _check_model(self) -> None:
        """Raise if the engine has the model in a form that cannot run a plan, now or any more."""

    def _inner_model(self) -> nn.Module:
        """The model without what the engine has wrapped it in."""
        model: nn.Module = self._model
        return model

    def _pass(self, last: bool) -> AbstractContextManager[None]:
        """A context for the forward and the backward of one pass; `last`: of the step."""
        raise NotImplementedError

    def _backward(self, last: bool) -> AbstractContextManager[None]:
        """A context for the backward of one pass; the body may run `autograd.grad` before it."""
        return nullcontext()

    def _stand_in(self) -> Callable[[bool], None] | None:
        """Takes part, without a gradient, in what the engine communicates in a step in which this
        rank has failed; the argument: whether the model was called in it.

        The ranks then agree after their last backward. If None, a rank that fails stops all ranks.
        """
        return None

    def _forget_step(self) -> None:
        """Make the engine ready for another step after one that has failed, on every rank."""

    # The loop.

    def __call__(
        self, batch: Any, *, weight: Weight | None = None, loss: Loss = "mean"
    ) -> MicroBatchLoop:
        """Iterate over this rank's micro-batches of a global batch. Collective.

        Call `backward` once for each. A rank without samples in a pass gets one sample, whose
        gradient does not count: the engine needs a forward and a backward of every rank.

        An exception in the body ends the loop and is reported to the other ranks. If the iterator
        is kept in a variable, use it as a context manager, whose exit does that:

            with passes(batch) as micro_batches:
                for micro_batch in micro_batches:
                    passes.backward(loss_fn(model, micro_batch))

        Args:
            batch: this rank's part of the global batch, as `HeteroBatchSampler` gives it: any
                pytree of tensors, split along dim 0. A rank without samples passes one sample.
            weight: `weight(micro_batch)` -> its weight, such as `poplar.tokens()`; default: its
                number of samples.
            loss: what is given to `backward`: the "mean" over what `weight` counts, the "sum", or
                the sum already divided by the global total ("global_mean").

        Raises:
            RankFailed: another rank failed before its last backward, and all ranks may go on.
            CollectiveTimeout: another rank failed, and all ranks are stopped.
            ValueError, TypeError, RuntimeError: this rank's batch is wrong, a loop body called
                `backward` of the loss itself, or not at all. At the end of one of the first loops:
                forwards have written other values into a buffer or frozen parameter on other ranks.
        """
        with self.collective_calls.running(LOOP):
            step = UserStep(self)

        def start() -> list[MicroBatch]:
            def check() -> None:
                self._check(batch)
                if loss == "mean":
                    self._checks.loss.watch_loop(self._inner_model(), batch, weight)

            error = caught(check)
            opened = self._splitter.open(self._control, batch, weight, loss, error)
            micro_batches = opened.micro_batches(opened.wait())
            self._checks.batches.compare(opened.batch)
            self._step = step
            return [
                each if each.samples else replace(each, batch=pytree.take(batch, [0]))
                for each in micro_batches
            ]

        return MicroBatchLoop(step, start, partial(self.collective_calls.running, LOOP))

    @collective
    def backward(self, loss: Tensor) -> None:
        """Run the backward of this pass with its weight. Collective in the last pass of a step.

        Args:
            loss: the scalar loss of the micro-batch; for fp16, `scaler.scale(loss)`.

        Raises:
            RankFailed: another rank failed before its last backward, so this step is dropped.
            CollectiveTimeout: another rank failed, and all ranks are stopped.
            RuntimeError: not in the loop, called twice for one micro-batch, the loss is not of
                this model, or gradients of earlier passes were dropped.
        """
        if self._step is None:
            raise agreed(RuntimeError(outside_of_the_loop(self._group.rank)))
        with self._naming_the_cause("a backward"):
            self._step.backward(loss)

    @collective
    def global_loss(self) -> Tensor:
        """The loss of the last global batch: a float64 scalar, equal on all ranks. Collective.

        It contains the loss scale if the losses were scaled.
        """
        device = next(self._model.parameters()).device
        loss = self._loss if self._step is None else self._step.loss
        value = torch.as_tensor(loss, dtype=torch.float64, device=device).reshape(()).clone()
        with self._naming_the_cause("global_loss()"):
            dist.all_reduce(value, group=self._group.process_group)
        return value

    def _end_step(self, has_failed: bool) -> None:
        """Keep what the step has left; drop gradients if it has failed."""
        if self._step is not None:
            self._loss, self._step = self._step.loss, None
        if has_failed:
            self._forget_step()
            for parameter in self._model.parameters():
                parameter.grad = None
        else:
            self._checks.forward_state.look()

    def _stop(self, call: str, error: BaseException) -> str:
        """Stop all ranks, because this one raises alone in a call that they all make.

        Returns:
            Why they are stopped; the cause may be another rank.
        """
        group = self._group
        failure = self._failure_of_others(call, error)
        if failure is not None:
            group.abort(str(failure))
            return str(failure)
        advice = "start again on all ranks, from a checkpoint"
        reason = stop_reason(group.name, waiting_in(call), error, advice=advice)
        group.report(reason, is_cause=not isinstance(error, CollectiveTimeout))
        if group.reports is not None:
            with suppress(StoreUnavailable):  # ranks with the same mistake raise their own errors
                group.reports.collect(group.peers())
        group.abort(reason)
        return reason

    def _failure_of_others(self, what: str, error: BaseException) -> CollectiveTimeout | None:
        """The failure of this rank in `what` if another one has stopped all ranks."""
        reports = self._group.reports
        peers = [] if reports is None else list(reports.causes())
        cause = error if isinstance(error, Exception) else None
        return self._group.fail(what, peers, cause) if peers else None

    @contextmanager
    def _naming_the_cause(self, what: str) -> Iterator[None]:
        """A context for what the engine communicates, which fails if another rank has stopped."""
        try:
            yield
        except RuntimeError as error:
            failure = None if is_agreed(error) else self._failure_of_others(what, error)
            if failure is None:
                raise
            raise failure from error

    # Checks.

    def _check(self, batch: Any) -> None:
        if self._step is not None:
            self._step.check_ended()
        self._checks.open_step()
        self._check_model()
        if batch is None or pytree.samples_in(batch) == 0:
            raise ValueError(
                "got no samples; a rank without samples in the plan passes one sample, as "
                f"HeteroBatchSampler gives it, because {self.engine} needs a pass of every rank"
            )

    def _agreed_plan(self, plan: Plan, allow_forward_state: bool) -> Plan:
        """The plan, once all ranks have checked theirs, which is the same. Collective."""

        def checked() -> str:
            self._check_model()
            reject_embeddings_by_micro_batch(self._inner_model(), allowed=allow_forward_state)
            self._check_plan(plan)
            plan.check_all_active(type(self).__name__)
            return plan.digest()

        digests = exchange_results(self._control, checked, what="building UnequalPasses")
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise agreed(
                ValueError(
                    f"rank(s) {others} have another plan than rank 0; make it once and give it to "
                    "all ranks, for example with autotune or Plan.from_json"
                )
            )
        return plan

    def _check_plan(self, plan: Plan) -> None:
        check_class("plan", plan, Plan)
        if plan.world_size != self._group.size:
            raise ValueError(
                f"the plan is for {plan.world_size} ranks, but {self.engine} has "
                f"{self._group.size}; make a plan for {self._group.size}"
            )
        if plan.stage not in self.stages:
            allowed = ", ".join(f"{stage} ({STRATEGIES[stage]})" for stage in self.stages)
            raise ValueError(
                f"the plan is of stage {plan.stage}, but {self.engine} is of stage {allowed}; plan "
                f"with poplar.integrations.{self.engine.lower()}.autotune, or with stage="
            )
        even = all(math.isclose(share, 1 / plan.world_size, abs_tol=1e-6) for share in plan.shares)
        ignored = [] if even or plan.stage == 0 else ["uneven shares"]
        ignored += [
            each.name
            for each in fields(plan)
            if each.name not in _CARRIED_OUT and getattr(plan, each.name) != each.default
        ]
        if ignored:
            raise ValueError(
                f"the plan sets {' and '.join(ignored)}, which only poplar.HeteroZeroOptimizer "
                f"carries out, not {self.engine}; plan with "
                f"poplar.integrations.{self.engine.lower()}.autotune"
            )


def autotune_for(
    passes: type[UnequalPasses],
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    stage: int,
    **options: Any,
) -> Plan:
    """The fastest plan that an engine can run; the arguments are those of `poplar.autotune`.

    Raises:
        ValueError: with these arguments, the plan would be one that the engine cannot run.
    """
    if stage not in passes.stages:
        raise ValueError(
            f"stage must be one of {list(passes.stages)} for {passes.engine}, got {stage!r}"
        )
    for name, only in _ONLY_WITH.items():
        if options.setdefault(name, only) not in (only, EXACT):
            raise ValueError(
                f"{name} must be {only!r} for {passes.engine}, got {options[name]!r}; leave it "
                "out, or plan with poplar.autotune and train with poplar.HeteroZeroOptimizer"
            )
    options.setdefault("compute_dtype", own_dtype(model))
    try:
        return autotune(model, loss_fn, example_batch, stage=stage, **options)
    except NoPlanFits as error:
        error.allow_only(passes.stages, policies=False)
        raise
