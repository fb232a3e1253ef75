"""The engine: the units of one model under one strategy, and the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.system.out_of_memory import free_frames, is_out_of_memory
from poplar.values.errors import CollectiveTimeout
from poplar.values.plan import Plan
from poplar.zero.agreement import StepSummary, agree_on_unused, leader_of
from poplar.zero.engine_hooks import EngineHooks
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.model_hook import Removable
from poplar.zero.passes.collective_pass import Mode, PassSettings
from poplar.zero.passes.collective_scheduler import CollectiveScheduler
from poplar.zero.recomputation import Recomputation
from poplar.zero.stages.strategy import Strategy
from poplar.zero.steps.step_settings import StepSettings
from poplar.zero.steps.step_state import Phase, StepState
from poplar.zero.unit import Unit, persistent_units
from poplar.zero.unsharded_values import UnshardedValues


class Engine:
    """The model of this rank. Methods that communicate say `Collective`; all others are local."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        strategy: Strategy,
        control: Control,
        *,
        blocks: Sequence[str] = (),
        check_step: Callable[[], None],
    ) -> None:
        """
        Args:
            blocks: names of the modules that may be recomputed.
            check_step: as for `EngineHooks`.
        """
        self.model, self.units = model, tuple(units)
        self.flats = [flat for unit in units for flat in unit.flats]
        self.trained = [flat for unit in units for flat in unit.trained]
        self.strategy, self.comm, self.control = strategy, strategy.comm, control
        strategy.prepare(self.units)
        self.scheduler = CollectiveScheduler(self.units, strategy, control)
        self.step = StepState()
        self.values = UnshardedValues(model, self.units, strategy, self.scheduler, control)
        self._has_unused = True
        """In the last step, backwards left parameters without a gradient on all ranks. True before
        the first step."""
        self.pass_is_explicit = False
        """The open pass was opened by `begin_pass`."""
        self.buffer_rank = 0
        """Whose buffers are saved for all: the first rank with samples. Others run no forward."""
        self.idle_ranks: frozenset[int] = frozenset()
        """Ranks without samples, whose buffers no forward of the training writes."""
        self._free_state: Callable[[], object] | None = None
        self.hooks = EngineHooks(self, check_step)
        self.recomputation = Recomputation(model, blocks, self.hooks.before_forwards())
        self.changes: list[Removable] = [*self.hooks.register(), self.recomputation]
        """Of the model. They hold a reference to the engine until the owner removes them."""

    def add_changes(self, changes: Iterable[Removable]) -> None:
        """Add changes of the model that are taken back with the engine's own."""
        self.changes += changes

    def follow(self, plan: Plan | None) -> None:
        """Take from a plan what may change between steps, equally on all ranks."""
        samples = [] if plan is None else list(map(plan.samples, range(plan.world_size)))
        self.buffer_rank = leader_of(samples) or 0
        self.idle_ranks = frozenset(rank for rank, count in enumerate(samples) if not count)
        self.hooks.follow(plan)
        self.strategy.make_persistent(persistent_units(plan, self.units))
        self.recomputation.follow(plan, self.comm.group.rank)

    def allow_loss_of(self, free_state: Callable[[], object]) -> None:
        """Call `free_state` before a pass that cannot be completed otherwise stops all ranks."""
        self._free_state = free_state

    # A step.

    def begin_step(self, *, keep_gradients: bool = False) -> None:
        """Reset the state of the previous step, except `.grad` if the user has just set it."""
        self.strategy.begin_step()
        self.hooks.run_gradient_hooks_last()
        for flat in self.trained:
            flat.begin_step()
            if not keep_gradients:
                self.strategy.free_gradient(flat)
        if not keep_gradients:
            self.drop_parameter_gradients()
        self.step = StepState()

    @property
    def has_gradients(self) -> bool:
        """Whether a pass has contributed to this step, which has not been abandoned."""
        return Phase.ACCUMULATED <= self.step.phase <= Phase.FINAL

    def reject_open_step(self, doing: str) -> None:
        """Raise in a step: between the begin of its first pass and its update. Local."""
        if self.has_gradients or self.scheduler.active:
            raise RuntimeError(f"{doing} in the middle of a step; call it after step()")

    def begin_pass(
        self, *, weight: float, leader: int | None, last: bool, mode: Mode = Mode.TRAIN
    ) -> bool:
        """Open a pass; close it with `end_pass`. Collective if it unshards or reduces.

        Args:
            weight, leader, last: as those of a `MicroBatch`.

        Returns:
            False if there is nothing to issue: no rank has samples and no order has been agreed
            yet, or all parameters are unsharded anyway.
        """
        if mode is not Mode.EVALUATE:
            self._drop_placeholders()
        if mode is Mode.EVALUATE and self.values.are_readable:
            return False
        reduces = mode.has_gradients and (last or self.strategy.reduces_every_pass)
        if leader is None:
            if not self.scheduler.has_order(mode, reduces):
                return False
            leader = 0
        self.pass_is_explicit = True
        self.scheduler.begin(PassSettings(mode, reduces, weight), leader)
        return True

    def begin_early_pass(self) -> bool:
        """Open the first pass of a step before its weight is known. Collective.

        Set the weight of the pass before its backward, or close it with `end_pass(failed=True)`.

        Returns:
            False, on all ranks, if forwards are local, or the collective order is not agreed yet.
        """
        busy = self.scheduler.active or self.values.has_unsharded
        if busy or self.forwards_are_local or not self.scheduler.has_order(Mode.TRAIN, True):
            return False
        self.begin_step()
        return self.begin_pass(weight=0.0, leader=0, last=False)

    @property
    def forwards_are_local(self) -> bool:
        """Whether a forward needs no other rank."""
        return not self.values.sharded

    def end_pass(self, *, failed: bool = False) -> None:
        """Close the open pass. After a failure its remaining slots get zeros. Collective.

        An error of this rank is raised when the pass has been completed with zeros, so the other
        ranks do not wait; CollectiveTimeout, if it could not be.
        """
        own = self.scheduler.current
        has_gradients = own.mode.has_gradients
        if has_gradients:
            self._drop_placeholders()
        try:
            if failed and has_gradients:
                self.drop_parameter_gradients()
            if own.interrupted_by is not None:
                raise own.interrupted_by
            self.scheduler.finish(failed=failed)
        except CollectiveTimeout:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                free_frames(error)
            if has_gradients:
                self.drop_parameter_gradients()
            self._complete(lambda: self.scheduler.finish(failed=True))
            raise
        finally:
            self.drop_pass()
        if has_gradients:
            self.step.advance(Phase.ISSUED if own.reduces else Phase.ACCUMULATED)

    def _complete(self, complete: Callable[[], None]) -> None:
        """Complete what other ranks wait for, after an error; stop all ranks if that fails too."""
        try:
            if self.scheduler.active and self.scheduler.current.interrupted_by is not None:
                raise self.scheduler.current.interrupted_by
            complete()
        except CollectiveTimeout:
            raise
        except Exception as error:
            rank = f"rank {self.comm.group.name}"
            reason = f"{rank}: a pass cannot be completed after {error!r}"
            if is_out_of_memory(error):
                if self._free_state is not None:
                    self._free_state()
                    self._free_state = None
                    self._complete(complete)
                    return
                reason = (
                    f"{rank} is out of memory and cannot complete a pass even without gradients; "
                    f"give it fewer samples or a smaller share: {error}"
                )
            self.stop_all_ranks(reason)
            raise CollectiveTimeout(reason) from error

    def drop_parameter_gradients(self) -> None:
        """Set `.grad` of all parameters to None, as at the start of a step."""
        for flat in self.trained:
            flat.drop_parameter_gradients()

    def set_placeholder_gradients(self, flats: Collection[FlatParameter]) -> None:
        """Set `.grad` of these flat parameters to tensors that raise if they are used."""
        for flat in flats:
            flat.set_placeholder_gradients()

    def _drop_placeholders(self) -> None:
        """Drop the placeholders, to which the next gradients must not be added."""
        for flat in self.trained:
            if flat.has_placeholders:
                flat.drop_parameter_gradients()

    def replaced_gradient(self) -> str | None:
        """The first parameter whose placeholder the user has replaced; None: there is none."""
        for flat in self.trained:
            for position in flat.replaced_gradients():
                return flat.names[position]
        return None

    def read_back_gradients(self) -> None:
        """Take over what the user has set `.grad` to, once the gradient is final. Local.

        Errors are those of `Strategy.read_back_gradients`.
        """
        for flat in self.trained:
            flat.leave_out(self.strategy.read_back_gradients(flat))

    @property
    def removed_gradients(self) -> list[str]:
        """The parameters that are left out of the step, as far as that was read back."""
        return [flat.names[position] for flat in self.trained for position in sorted(flat.removed)]

    def stop_all_ranks(self, reason: str) -> None:
        """Make the later collectives of all ranks raise: this rank cannot go on with them."""
        self.control.abort(reason)
        self.comm.abort(reason)

    def wait_for_reductions(self) -> None:
        """Wait until this rank's slice of the mean gradient is final. Collective."""
        if self.step.phase < Phase.REDUCED:
            try:
                self.strategy.wait_for_reductions()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                free_frames(error)
                self._complete(self.strategy.wait_for_reductions)
            self.step.advance(Phase.REDUCED)

    def finish_gradients(self) -> None:
        """Wait until the gradient is final wherever the update and the user read it. Collective."""
        self.wait_for_reductions()
        if self.step.phase < Phase.FINAL:
            if self.strategy.shows_gradients and self._has_unused:
                self._leave_out_unused()
            self.strategy.finish_gradients(self.units)
            self.step.advance(Phase.FINAL)
            if not self.strategy.shows_gradients and not self.step.gradients_are_hidden:
                self.set_placeholder_gradients(self.trained)

    def _leave_out_unused(self) -> None:
        """Leave what got a gradient on no rank out of the step, so that `.grad` shows None.

        Collective, unless the step is closed. So it is not called after a step in which all
        parameters got one: `.grad` of what is unused then is zeros, which are not applied.
        """
        state = self.step
        if state.summary is None:
            unused = agree_on_unused(self.control, self.trained)
        else:
            unused = state.summary.unused
        self._has_unused = any(unused.values())
        for flat in self.trained:
            flat.leave_out(unused[flat])
        if state.settings is not None:
            state.settings.leave_out(self.removed_gradients)

    def close_step(self, summary: StepSummary, settings: StepSettings) -> None:
        """The ranks agree to apply the step."""
        self.step.close(summary, settings)
        # Not `=`: the summary counts gradients that the user has set as used.
        self._has_unused |= any(summary.unused.values())

    def empty_gradients(self) -> list[Tensor]:
        """Memory for `full_gradients`."""
        return [torch.empty(f.numel, dtype=torch.float32, device=f.device) for f in self.trained]

    def full_gradients(self, memory: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's name and its full mean gradient, in `memory`. Collective.

        Of a local parameter, the gradient of this rank's own part.
        """
        for flat, whole in zip(self.trained, memory, strict=True):
            own = flat.layout.bounds(self.comm.group.rank)
            part = flat.intersect_owned(*own)
            if part is not None:
                whole[own[0] : own[1]].copy_(flat.gradient[part])
            what = f"the gradients of {flat.name}"
            if not flat.is_local:
                self.comm.all_gather(whole, flat.layout, what=what).wait()
            places = zip(flat.names, flat.parameters, flat.offsets, strict=True)
            for name, parameter, offset in places:
                yield name, whole[offset : offset + parameter.numel()].view(parameter.shape)

    def drop_pass(self) -> None:
        """Drop the open pass, if there is one, without finishing it."""
        self.pass_is_explicit = False
        self.scheduler.drop()

    def reduce_without_backward(self) -> None:
        """Reduce `.grad` and the accumulated gradients as a last pass. Collective."""
        for flat in self.trained:
            flat.check_gradients()
        weight = 1.0 / self.comm.group.size
        self.begin_pass(weight=weight, leader=0, last=True, mode=Mode.REDUCE_ONLY)
        self.end_pass()
        self.wait_for_reductions()
