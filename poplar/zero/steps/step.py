"""One optimizer step on this rank: open, passes, close, apply.

    open    check and split the batch; agree on sample counts and weights
    pass    forward, backward and the collectives of one micro-batch
    close   agree on errors, settings, loss, gradient norm and used parameters
    apply   clip, update, and send the new values

Its state is one `StepState`, owned by the engine, which also moves it when the user's own loop runs
a backward. If a pass of a rank fails, the rank completes it and those that follow with zeros and
reports the error in `close`, so that all ranks raise and none applies the step. Whatever else a
rank raises stops all ranks: see `collective_calls`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from poplar import ops
from poplar.data import pytree
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory
from poplar.values.errors import CollectiveTimeout, agreed, is_agreed
from poplar.zero.agreement import (
    StepSummary,
    caught,
    close_step,
    raise_on_any_error,
)
from poplar.zero.checks.placeholder_gradient import replaced_in_the_loop
from poplar.zero.checks.step_checks import StepChecks
from poplar.zero.collective_calls import stop_reason, waiting_in
from poplar.zero.engine import Engine
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.grad_scaler import GradScaler
from poplar.zero.gradient_norm import full_norm
from poplar.zero.held_memory import held_memory, out_of_memory_error
from poplar.zero.micro_batch_loop import MicroBatchLoop
from poplar.zero.micro_batch_loss import PassLoss
from poplar.zero.micro_batches import MicroBatch, OpenedStep
from poplar.zero.steps.nonfinite import IssuedStep, NonFiniteSteps, OnNonFinite, differ
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.steps.step_state import EarlyForward, Phase
from poplar.zero.streams import PassWork, RankTimes
from poplar.zero.update import ShardedUpdate

_NOT_EARLY = EarlyForward()


class SpeedFollower(Protocol):
    """What the times of the ranks are reported to: `poplar.drift.speed_follower`."""

    @property
    def wants_to_agree(self) -> bool: ...
    @property
    def changes_ranks(self) -> bool: ...
    @property
    def known(self) -> Any: ...
    def follow_ranks(self, known: Any) -> None: ...
    def measure(self) -> None: ...
    def obey(self, order: Any) -> None: ...
    def work(self, micro_batch: MicroBatch) -> PassWork: ...
    def add(self, times: Sequence[RankTimes], *, step: int, agree: bool) -> None: ...


class Step:
    """Moves the steps of one engine through their phases. One object serves all steps."""

    left_early = "the micro_batches loop was left early"

    def __init__(
        self,
        engine: Engine,
        update: ShardedUpdate,
        checks: StepChecks,
        on_nonfinite: OnNonFinite,
    ) -> None:
        self._engine = engine
        self._update = update
        self._checks, self._replicas = checks, checks.replicas
        streams = engine.strategy.streams
        self.nonfinite = NonFiniteSteps(on_nonfinite, update, streams, engine.control)
        self._rank = engine.comm.group.name
        self._trace = engine.comm.group.trace
        self._loop: weakref.ref[MicroBatchLoop] | None = None
        self._follower: SpeedFollower | None = None

    def follow_speeds(self, follower: SpeedFollower | None) -> None:
        """Report the times of later steps to `follower`; all ranks have one, or none."""
        self._follower = follower

    def report(self, summary: StepSummary) -> None:
        """Report the times of a step that has been applied. Collective if a rank asked for it."""
        if self._follower is not None:
            step, agree = self._update.updates, summary.wants_to_agree
            self._follower.add(summary.times, step=step, agree=agree)

    # Open.

    def run_early_forward(self, opened: OpenedStep, forward: PassLoss) -> EarlyForward:
        """Run the first forward while the ranks agree on the weights. Collective.

        With sharded parameters, the forward needs collectives. So the first pass is opened, on all
        ranks, once its collective order is known; a rank with an error completes it with zeros.
        """
        engine = self._engine
        pass_is_open = engine.begin_early_pass()
        can_run = opened.first_pass == 0 if pass_is_open else engine.forwards_are_local
        if opened.first_pass is None or not can_run:
            return EarlyForward(pass_is_open=pass_is_open)
        began, computing = self._trace.now(), engine.strategy.timing.start_span()
        first = opened.first
        if self._follower is not None:  # which counts the elements of the batch in `begin_pass`
            first = pytree.map_tensors(lambda tensor: tensor, first)  # other containers
        with engine.hooks.running("loss_fn"):
            forward.compute_early(first)
        return EarlyForward(began, pass_is_open, computing.stop())

    def start(self, opened: OpenedStep, early: EarlyForward = _NOT_EARLY) -> list[MicroBatch]:
        """Wait for the sizes of all ranks; returns this rank's micro-batches. Collective."""
        sizes = opened.wait()
        if sizes.has_error:  # ranks may still be in their forward
            early = self._drop_pass_of(early)
        try:
            micro_batches = opened.micro_batches(sizes)
            if not early.pass_is_open:  # whose collectives come first
                self._checks.batches.compare(opened.batch)
        except CollectiveTimeout:
            raise
        except Exception:
            self._drop_pass_of(early)
            raise
        if not early.pass_is_open:
            self._engine.begin_step()
        if early.computed is not None:
            self._engine.strategy.timing.step.add_span(early.computed)
        self._engine.step.open(sizes)
        return micro_batches

    def _drop_pass_of(self, early: EarlyForward) -> EarlyForward:
        """Complete a pass that began early with zeros, because there is no step. Collective."""
        if early.pass_is_open:
            self._engine.end_pass(failed=True)
            self._engine.wait_for_reductions()
            self._engine.begin_step()
        return _NOT_EARLY

    # Passes.

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        forward: PassLoss,
        scaler: GradScaler | None,
        early: EarlyForward,
    ) -> Exception | None:
        """Run all passes, after an error without a backward; returns that error. Collective."""
        error: Exception | None = None
        for micro_batch in micro_batches:
            opened = self.begin_pass(micro_batch, early)
            if not opened:
                continue
            early = EarlyForward(None if micro_batch.samples else early.began)
            try:
                if micro_batch.samples and error is None:
                    self._run_pass(micro_batch, forward, scaler)
            except CollectiveTimeout:
                raise
            except Exception as failure:
                if forward.abort(failure):
                    raise
                error = self._failed_pass(failure, micro_batch)
            if (late := self._complete_pass(failed=error is not None)) is not None:
                error = error or self._failed_pass(late, micro_batch)
        return error

    def _run_pass(
        self, micro_batch: MicroBatch, forward: PassLoss, scaler: GradScaler | None
    ) -> None:
        """Forward and backward.

        Its own function, so that an error leaves no other reference to the autograd graph.
        """
        with self._engine.hooks.running("loss_fn"):
            value = forward(micro_batch.batch)
        if not value.requires_grad:
            raise RuntimeError(
                f"rank {self._rank}: the loss has no gradient: loss_fn detached it, computed it "
                "under torch.no_grad(), or used no parameter that is trained; return the loss "
                "with its graph"
            )
        self._checks.look_at_graph(value, stacklevel=8)
        (value if scaler is None else scaler.scale(value)).backward()
        forward.raise_any_error()
        self._engine.step.add_loss(value)

    def _failed_pass(self, error: Exception, micro_batch: MicroBatch) -> Exception:
        """The error to report; if memory ran out, free what the pass held and note its size."""
        if not is_out_of_memory(error):
            return self._engine.strategy.explain_error(error)
        free_failed_pass(error)
        self._engine.drop_parameter_gradients()
        self._engine.step.run_out_of_memory(micro_batch.samples)
        return self._out_of_memory(error, micro_batch.samples)

    def _out_of_memory(self, error: Exception, samples: int | None) -> Exception:
        held = held_memory(self._engine, self._update)
        return out_of_memory_error(error, self._rank, samples, held)

    # The user's own loop.

    def enter_user_loop(self, loop: MicroBatchLoop) -> None:
        """Note that the passes of this step are those of `loop`."""
        self._engine.step.enter_user_loop()
        self._loop = weakref.ref(loop)

    @property
    def has_open_loop(self) -> bool:
        """Whether a loop of the user goes on."""
        loop = self._loop() if self._loop is not None else None
        return loop is not None and loop.is_open

    def leave_user_loop(self, why: str) -> bool:
        """Abandon the step of a loop that is still open; whether there was one. Collective then.

        `why`: what the loop raises if it goes on.
        """
        loop = self._loop() if self._loop is not None else None
        if loop is not None and loop.is_open:
            loop.close(why, why=why)
            return True
        if loop is not None:  # its step has been applied, or it has ended
            loop.end()
        return False

    def finish_user_passes(self) -> None:
        """Called at the end of the user's loop. Collective."""
        if self._engine.has_gradients:  # not if step() came inside the loop
            self._engine.finish_gradients()

    @property
    def has_open_pass(self) -> bool:
        return self._engine.step.open_micro_batch is not None

    def begin_pass(self, micro_batch: MicroBatch, early: EarlyForward = _NOT_EARLY) -> bool:
        """Open a pass; False if it has nothing to issue. Collective."""
        state = self._engine.step
        ran_early = early.began is not None and micro_batch.samples
        began = early.began if ran_early else self._trace.now()
        if early.pass_is_open:
            self._engine.scheduler.current.set_weight(micro_batch.weight)
            opened = True
        else:
            opened = self._engine.begin_pass(
                weight=micro_batch.weight, leader=micro_batch.leader, last=micro_batch.last
            )
        timing = self._engine.strategy.timing
        state.begin_pass(micro_batch if opened else None, began, timing.start_span())
        if self._follower is not None and micro_batch.samples:
            timing.step.add_work(self._follower.work(micro_batch))
        return opened

    def end_pass(self, *, failed: bool = False) -> None:
        """Close the open pass, if there is one. Collective."""
        state = self._engine.step
        micro_batch = state.end_pass()
        if micro_batch is not None:
            self._engine.end_pass(failed=failed)
            if state.computing is not None and micro_batch.samples:
                self._engine.strategy.timing.step.add_span(state.computing.stop())
            what = f"a pass of {micro_batch.samples} samples"
            self._trace.add("pass", what, state.pass_began)

    def _complete_pass(self, *, failed: bool = False) -> Exception | None:
        """As `end_pass`; returns an error after which the pass is complete. Collective."""
        try:
            self.end_pass(failed=failed)
        except CollectiveTimeout:
            raise
        except Exception as error:
            if self._engine.scheduler.active:
                raise
            return error
        return None

    def reject_open_loop(self) -> None:
        """Raise in this rank alone if its loop has not ended or was left early."""
        state = self._engine.step
        if state.phase is Phase.ABANDONED:
            raise agreed(
                RuntimeError(
                    f"rank {self._rank}: the micro_batches loop of this step was left before its "
                    "end, so the step was abandoned on all ranks; start the next step with a new "
                    "micro_batches()"
                )
            )
        if state.open_micro_batch is not None and not state.open_micro_batch.last:
            raise agreed(
                RuntimeError(
                    f"rank {self._rank}: step() or clip_grad_norm_() inside the micro_batches "
                    "loop, before its last micro-batch; call it after the loop"
                )
            )

    def finish_passes(self) -> None:
        """Reduce the gradients of the step, whether or not there was a backward. Collective."""
        engine, state = self._engine, self._engine.step
        if state.open_micro_batch is not None:
            self.end_user_pass(())
        elif state.phase is Phase.EMPTY:
            if not any(p.grad is not None for flat in engine.trained for p in flat.parameters):
                raise RuntimeError(
                    f"rank {self._rank}: step() without a backward since the last step, so there "
                    "is no gradient to apply"
                )
            engine.hooks.reject_uneven_backward()
            engine.begin_step(keep_gradients=True)
            engine.reduce_without_backward()
        elif state.phase is Phase.ACCUMULATED:
            engine.reduce_without_backward()  # all passes were inside no_sync()
        engine.finish_gradients()
        engine.read_back_gradients()  # before the norm, the check and the factor

    def begin_user_pass(self, micro_batch: MicroBatch, rest: Sequence[MicroBatch]) -> bool:
        """Open a pass of the user's loop; one without samples ends here. Collective."""
        if not self.begin_pass(micro_batch):
            return False
        if not micro_batch.samples:
            self.end_user_pass(rest)
        return micro_batch.samples > 0

    def end_user_pass(self, rest: Sequence[MicroBatch]) -> None:
        """End the open pass of the user's loop; on an error, abandon the step on all ranks.

        `rest`: this rank's later passes in the step.
        """
        micro_batch = self._engine.step.open_micro_batch
        if micro_batch is None:
            return
        reason = self._mistake_in_body(micro_batch)
        if reason is not None:
            self.abandon(rest, reason)
            raise reason
        if (error := self._complete_pass()) is not None:
            reason = error
            if is_out_of_memory(error):
                reason = self._out_of_memory(error, micro_batch.samples)
            self.abandon(rest, reason)
            raise reason from (error if reason is not error else None)

    def _mistake_in_body(self, micro_batch: MicroBatch) -> Exception | None:
        """What the body of the user's loop has done wrong in the open pass."""
        counts = micro_batch.samples and micro_batch.weight
        if counts and not self._engine.scheduler.current.has_gradients:
            return RuntimeError(
                f"rank {self._rank}: the body of the micro_batches loop ran no backward for a "
                f"micro-batch of {micro_batch.samples} samples, which count in the mean; call "
                "loss.backward() once for every micro-batch, or give it the weight 0 (weight=)"
            )
        replaced = self._engine.replaced_gradient()
        return None if replaced is None else replaced_in_the_loop(self._rank, replaced)

    def abandon(self, rest: Iterable[MicroBatch], reason: Exception) -> None:
        """Abandon the step: complete its passes with zeros and report `reason` to all ranks."""
        self._complete_pass(failed=True)
        for micro_batch in rest:
            if self.begin_pass(micro_batch):
                self._complete_pass(failed=True)
        self._engine.finish_gradients()  # as the other ranks at the end of their loop
        try:
            self.close(StepSettings((), updates=0), reason)
        except Exception as error:
            if error is not reason:
                raise
        self._engine.step.advance(Phase.ABANDONED)

    # Close.

    def agree(self, settings: StepSettings, error: Exception | None = None) -> StepSummary:
        """Finish the passes and close the step, unless it has been closed. Collective."""
        self.reject_open_loop()
        try:
            self.finish_passes()
        except CollectiveTimeout:
            raise
        except Exception as failure:
            if is_agreed(failure):  # it has abandoned the step
                raise
            error = error or failure
        settings.leave_out(self._engine.removed_gradients)
        summary = self._engine.step.summary
        if summary is None:
            return self.close(settings, error)
        if error is not None:
            raise error
        settings.check()
        self._engine.step.use(settings)
        return summary

    def close(
        self,
        settings: StepSettings,
        error: Exception | None = None,
        *,
        may_run_again: bool = False,
    ) -> StepSummary:
        """Agree that the step may be applied; raise on all ranks if one failed. Collective.

        Arguments and errors are those of `close_step`.
        """
        engine, state = self._engine, self._engine.step
        try:
            self.nonfinite.raise_if_found()  # in the last step, if the device had not decided yet
            if error is None:
                error = caught(settings.check) or caught(self._adopt_replaced_data)
                error = error or caught(self._update.allocate_state)
                if error is not None and is_out_of_memory(error):
                    error = self._out_of_memory(error, None)
            self._replicas.raise_if_different()
            summary = close_step(
                engine.comm,
                engine.control,
                engine.trained,
                loss=state.loss,
                times=engine.strategy.timing.latest().after(state.waited_to_open),
                wants_to_agree=self._follower is not None and self._follower.wants_to_agree,
                norm_type=settings.norm_type,
                settings=settings,
                error=error,
                too_large=state.too_large,
                may_run_again=may_run_again,
                checksum=self._replicas.outgoing,
            )
            self._checks.forward_state.look()
        except BaseException:
            self._engine.begin_step()
            raise
        engine.close_step(summary, settings)
        self._replicas.receive(summary.checksums)
        return summary

    def norm(self, settings: StepSettings) -> Tensor:
        """Norm of the reduced gradient before `scale` is applied. Collective.

        In a closed step it is computed again, by all ranks: the user may have changed the gradient
        since, which leaves no trace at stages that show it, and on other ranks at no stage.
        """
        was_closed = self._engine.step.summary is not None
        summary, norm_type = self.agree(settings), settings.norm_type
        state = self._engine.step
        is_current = not was_closed or state.norm_is_current
        if summary.norm_type == norm_type and is_current:
            return summary.norm
        norm = full_norm(self._engine.comm, self._engine.trained, norm_type)
        if state.scale is None:
            return norm
        factor = 1.0 if state.factor is None else state.factor
        return torch.where(state.scale == 0, norm, norm * factor / state.scale)

    def clip(self, settings: StepSettings) -> Tensor:
        """Scale the gradient to a norm of at most `max_norm`; returns its norm. Collective."""
        norm, scale = self.norm(settings), self._engine.step.scale
        if settings.max_norm is None:  # on all ranks, which have agreed on it
            raise TypeError("max_norm=None; give a number")
        self._scale_gradient(ops.clip_coefficient(norm, settings.max_norm, scale))
        return (norm if scale is None else norm * scale).float()

    def multiply_gradient(self, factor: Tensor, settings: StepSettings) -> Tensor:
        """As `AgreedGradient._multiply_gradient`. Collective."""
        found_inf = (~torch.isfinite(self.norm(settings))).float()
        self._engine.step.find_inf(found_inf)
        device = self._engine.trained[0].device
        self._scale_gradient(factor.to(device, torch.float64, non_blocking=True))
        return found_inf

    def _scale_gradient(self, factor: Tensor) -> None:
        state, strategy = self._engine.step, self._engine.strategy
        hidden = state.gradients_are_hidden
        scaled = not hidden and strategy.scale_gradients(self._engine.units, factor)
        state.multiply(factor, in_update=not scaled)

    # Apply.

    def apply(
        self,
        groups: Sequence[Mapping[str, Any]],
        settings: StepSettings,
        error: Exception | None = None,
    ) -> StepSummary:
        """Update the parameters and begin the next step. Collective.

        Args:
            groups: the outer param groups, with the hyper-parameters of this step.
            settings: of this rank.
            error: of hooks of this rank that have run before the update.
        """
        summary = self._engine.step.summary
        if summary is None:
            # The norm shows losses that are not known; the reductions compute sums of squares.
            summary = self.agree(settings, error)
        else:
            error = error or caught(settings.check) or caught(self._adopt_replaced_data)
            if not self._engine.step.gradients_are_hidden:
                error = error or caught(self._engine.read_back_gradients)
            settings.leave_out(self._engine.removed_gradients)
            self._raise_any(error, among_all=summary.has_hooks)
        state = self._engine.step
        state.use(settings)
        scaled = state.found_inf is not None
        if state.found_inf is None:
            flag = self.nonfinite.flag(summary)
        elif summary.settings is None:  # the loss scaler decides
            flag = state.found_inf
        else:
            flag = torch.maximum(state.found_inf, differ(summary.settings).float())
        found_inf = flag if scaled or self.nonfinite.skips() else None
        self._update_parameters(groups, summary.unused, found_inf)
        losses, closed_with = state.pass_losses, state.settings or settings
        applied = found_inf is None
        issued = IssuedStep(summary, losses, closed_with, applied=applied, scaled=scaled)
        state.skip_by(self.nonfinite.record(flag, issued))
        self._engine.begin_step()
        self.nonfinite.raise_if_read()
        return summary

    def _adopt_replaced_data(self) -> None:
        """Update the values that the parameters have now: the user may have set `.data` since.

        The step's passes and what the user runs between them and the update may do so.
        """
        self._update.adopt_replaced_data(self._engine.flats)

    def _raise_any(self, error: Exception | None, *, among_all: bool) -> None:
        """Raise an error of a closed step. Collective if hooks of any rank may have raised it."""
        if not among_all:
            if error is not None:
                raise error
            return
        try:
            raise_on_any_error(self._engine.control, error, doing="a step")
        except BaseException:
            self._engine.begin_step()
            raise

    def _update_parameters(
        self,
        groups: Sequence[Mapping[str, Any]],
        unused: dict[FlatParameter, set[int]],
        found_inf: Tensor | None,
    ) -> None:
        engine, state, strategy = self._engine, self._engine.step, self._engine.strategy
        state.begin_update()
        for flat in engine.trained:
            # Also what the user has removed, or set again, since the ranks agreed.
            unused[flat] = (unused[flat] - flat.used) | flat.removed
            strategy.wait_for_readers(flat)
        with self._trace.span("optimizer", "the update"):
            scalars = state.factor, found_inf
            later, copy_to_host = "; ".join(state.later), strategy.copy_to_host
            self._update.step(groups, unused, *scalars, later=later, copy_to_host=copy_to_host)
        strategy.all_gather_updated_parameters(engine.units)
        for flat in engine.trained:
            flat.mark_updated(unused[flat])
        strategy.end_step()
        self._replicas.record_update()
        torch.clear_autocast_cache()  # an autocast around several steps keeps casts of old values

    def is_zero(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the user has set zero gradients at learning rate 0.

        torch's checkpoint code does so to create the optimizer state, which must not decay.
        """
        if self._engine.has_gradients or self._engine.step.open_micro_batch is not None:
            return False
        given = [p.grad for flat in self._engine.trained for p in flat.parameters]
        rates = [float(group.get("lr", 1.0)) for group in groups]
        return (
            all(rate == 0.0 for rate in rates)
            and all(gradient is not None for gradient in given)
            and not any(bool(gradient.any()) for gradient in given if gradient is not None)
        )

    def stop(self, call: str, error: BaseException) -> None:
        """Stop all ranks, because this rank raises alone in a collective call.

        A single rank leaves nobody waiting, so it only stops if the update had begun.
        """
        self._engine.drop_pass()
        state = self._engine.step
        if self._engine.comm.group.size == 1 and not state.is_updating:
            return
        where = waiting_in(call)
        if state.is_updating or state.summary is not None:
            place = "the update" if state.is_updating else f"{call}, before the update"
            where = (
                f"{place}, after all ranks had agreed on it, so its parameters may differ from "
                "those of the other ranks"
            )
        # After a CollectiveTimeout, too: ranks may wait in other channels.
        self._engine.stop_all_ranks(stop_reason(self._rank, where, error))
