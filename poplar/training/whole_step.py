"""One optimizer step from the batch to the update, as `train_step` and `step()` take it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from poplar.system.out_of_memory import free_frames
from poplar.training.plan_changes import PlanChanges
from poplar.training.trained_model import TrainedModel
from poplar.values.errors import agreed
from poplar.zero.agreement import MicroBatchesTooLarge, StepSummary, caught, raise_on_any_error
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.micro_batch_loss import PassLoss
from poplar.zero.micro_batches import Loss, OpenedStep, Weight, open_joint_pass
from poplar.zero.steps.step_hooks import has_pre_hooks, run_post_hooks, run_pre_hooks
from poplar.zero.steps.step_result import StepResult, Stopwatch
from poplar.zero.steps.step_state import Phase
from poplar.zero.streams import RankTimes


def check_before_step(training: TrainedModel) -> None:
    """Raise if no step can begin, or if the model is not as it was. Local.

    A step that has begun in a loop of the user is abandoned on all ranks.
    """
    engine = training.engine
    if engine.values.has_unsharded:
        raise RuntimeError("a step was started inside full_parameters(); leave that context first")
    engine.hooks.drop_implicit_pass()
    if training.step.leave_user_loop(_STEP_INSIDE_LOOP) or engine.scheduler.active:
        raise RuntimeError(_STEP_INSIDE_LOOP)
    if engine.has_gradients and training.ranks.group.rank == 0:
        warnings.warn(
            "a step begins, and the gradients of the last one are dropped, because they were "
            "not applied; call optimizer.step() after the micro_batches loop, or "
            "optimizer.zero_grad() to drop them without this warning",
            stacklevel=4,
        )
    training.check_model()


def open_batch(
    training: TrainedModel,
    prepare: Callable[[], None],
    batch: Any,
    weight: Weight | None,
    loss: Loss,
    version: int,
) -> OpenedStep:
    """Check and split the batch and start to exchange its weight. Collective.

    `prepare` is what else may fail on this rank before the step, `version` that of `PlanSchedule`.
    """

    def check() -> None:
        check_before_step(training)
        prepare()
        training.checks.batches.look_at_lengths(batch)

    error = caught(check)
    control = training.ranks.control
    return training.splitter.open(control, batch, weight, loss, error, version)


def scaler_of(training: TrainedModel, given: GradScaler | None) -> GradScaler | None:
    """The loss scaler of a step: that of the user, or, if it is disabled, of the training."""
    is_disabled = isinstance(given, GradScaler) and not given.is_enabled()
    return training.scaler if given is None or is_disabled else given


def take_step(
    training: TrainedModel,
    open_passes: Callable[[Callable[[], None] | None], tuple[OpenedStep, PassLoss]],
    max_norm: float | None,
    scaler: GradScaler | None,
) -> StepResult:
    """One optimizer step, by the public methods of the optimizer. Collective.

    `open_passes` opens the step and returns the losses of its passes. Its argument is what to do
    before the step is opened again, if memory ran out.
    """
    engine, optimizer = training.engine, cast(Any, training.optimizer)
    stopwatch = Stopwatch(engine.strategy.streams, training.ranks.group)
    again: Callable[[], None] | None = None
    while True:
        try:
            opened, forward = open_passes(again)
            summary = _run_passes(training, forward, opened, max_norm, scaler)
            break
        except MicroBatchesTooLarge as found:
            again = partial(training.use_smaller_batches, found.batches)
    state, timing = engine.step, engine.strategy.timing.step
    plan = training.plan  # `optimizer.step()` may change it
    state.enter_train_step(scaler)
    if not has_pre_hooks(optimizer):
        state.hide_gradients()
    engine.finish_gradients()
    try:
        training.unscale()
        norm = optimizer.clip_grad_norm_(max_norm) if max_norm is not None else None
        state.leave_train_step()
        optimizer.step()
    except BaseException:
        if scaler is not None:
            scaler.abandon(optimizer)
        raise
    stopwatch.stop()
    slowest, ranks = summary.waiting_on, training.ranks
    return StepResult(
        samples=state.samples,
        waiting_on=slowest if slowest is None else ranks.group.names[slowest],
        skipped=state.was_skipped,
        losses=summary.losses,
        norm=norm,
        rank_times=ranks.of_all(summary.times, RankTimes(0.0, 0.0)),
        plan=plan,
        stopwatch=stopwatch,
        waiting_seconds=lambda: state.waited_to_open + timing.waited_seconds(),
    )


def take_joint_step(
    training: TrainedModel,
    forward: PassLoss,
    prepare: Callable[[], None],
    *,
    samples: int,
    max_norm: float | None = None,
) -> StepResult:
    """One optimizer step of one pass whose loss all ranks compute together. Collective.

    The loss of the global batch is the sum over ranks. `forward` calls collectives itself, in
    forward and backward. A rank may be in one of them when others start a reduction, so no rank
    waits for reductions before the end of the pass.

    Args:
        forward: computes this rank's part of the loss; its argument is None.
        prepare: checks this rank's part of the batch; it may raise.
        samples: of this rank in the global batch.
    """
    scaler, engine = training.scaler, training.engine

    def check() -> None:
        check_before_step(training)
        if scaler is not None:
            scaler.make_scale(engine.trained[0].device)
        prepare()

    def open_passes(_: Callable[[], None] | None) -> tuple[OpenedStep, PassLoss]:
        return open_joint_pass(training.ranks.control, samples, caught(check)), forward

    engine.strategy.reductions.allow(len(engine.trained) + 1)
    return take_step(training, open_passes, max_norm, scaler)


def _run_passes(
    training: TrainedModel,
    forward: PassLoss,
    opened: OpenedStep,
    max_norm: float | None,
    scaler: GradScaler | None,
) -> StepSummary:
    """Run the passes of an opened step and close it. Collective."""
    step, engine = training.step, training.engine
    early = step.run_early_forward(opened, forward)
    error = step.run_passes(step.start(opened, early), forward, scaler, early)
    engine.wait_for_reductions()
    scale = None if scaler is None else scaler.make_scale(engine.trained[0].device)
    settings = training.settings(max_norm=max_norm, scale=scale)
    try:
        return step.close(
            settings, error, may_run_again=training.request.on_out_of_memory == "retry"
        )
    except MicroBatchesTooLarge:
        if error is not None:
            free_frames(error)  # they hold the batch, or activations if the leader failed
        raise


def apply_step(training: TrainedModel, changes: PlanChanges, closure: Any) -> float | None:
    """`HeteroZeroOptimizer.step`, which documents it, with the hooks of the user. Collective."""
    optimizer = training.optimizer

    def before() -> None:
        nonlocal closure
        closure = run_pre_hooks(optimizer, closure)
        if hasattr(optimizer, "found_inf"):  # set by torch's GradScaler.step, not by Poplar's
            for name in ("found_inf", "grad_scale"):
                vars(optimizer).pop(name, None)
            raise RuntimeError(PLAIN_SCALER)

    error, result = caught(before), None
    if error is None and closure is not None:
        try:
            with torch.enable_grad(), training.engine.hooks.running("closure"):
                result = closure()
        except Exception as failure:
            state = training.engine.step
            if state.in_user_loop or state.phase is Phase.ABANDONED:
                agreed(failure)  # the loop over micro-batches reports it
            raise
    groups = optimizer.param_groups
    if error is None and training.step.is_zero(groups):
        return result
    if error is None:
        training.unscale()
        error = caught(training.check_scaled)
    scaler = training.step_scaler
    summary = training.step.apply(groups, training.settings(), error)
    if scaler is not None:
        scaler.update()
    training.update.copy_new_settings(groups)
    changes.end_step()
    optimizer._optimizer_step_code()
    error = caught(partial(run_post_hooks, optimizer, closure))
    if summary.has_hooks:
        doing, outcome = "a hook after a step", "it raises, too, after all have applied the step"
        raise_on_any_error(training.ranks.control, error, doing=doing, outcome=outcome)
    elif error is not None:
        raise error
    training.step.report(summary)
    return result


PLAIN_SCALER = (
    "torch.amp.GradScaler reads .grad on each rank alone, but the gradients are sharded and all "
    "ranks must skip a step together; use poplar.GradScaler, with the same arguments"
)
_STEP_INSIDE_LOOP = (
    "a step was started inside of the micro_batches loop of another step, which is now abandoned "
    "on all ranks; end the loop first. After an exception in its body that you handle, use `with "
    "optimizer.micro_batches(batch) as micro_batches:`, which ends it"
)
