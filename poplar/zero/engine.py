"""The engine: the units of one model under one strategy, and the hooks that drive them.

`train_step` and `micro_batches` open and close passes explicitly (`begin_pass`, `end_pass`). Any
other backward is an implicit pass: it begins at its first unit or gradient and ends with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from poplar.comm import Communicator, Control
from poplar.data import pytree
from poplar.system.out_of_memory import free_frames, is_out_of_memory
from poplar.values.errors import CollectiveTimeout
from poplar.zero.absent_parameter import direct_access
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.checks.placeholder_gradient import PlaceholderGradient
from poplar.zero.checks.recorded_calls import reject_forward_in_replay
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.model_hook import ModelHook, Removable
from poplar.zero.passes.collective_pass import Mode, PassSettings
from poplar.zero.passes.collective_scheduler import CollectiveScheduler
from poplar.zero.recomputation import Recomputation
from poplar.zero.stages.strategy import Strategy
from poplar.zero.step_state import Phase, StepState
from poplar.zero.unit import Unit


class Engine:
    """The model of this rank. Methods that communicate say `Collective`; all others are local."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        strategy: Strategy,
        comm: Communicator,
        control: Control,
        *,
        blocks: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.strategy = strategy
        self.comm = comm
        self.control = control
        strategy.prepare(self.units)
        self.scheduler = CollectiveScheduler(self.units, strategy, control)
        self.step = StepState()
        self.requires_gradient_sync = True
        """An implicit backward is the last of its step. False inside `no_sync`."""
        self.has_early_pass = False
        """A pass is open whose weight is not known yet."""
        self.free_state: Callable[[], object] | None = None
        """Frees optimizer state that may be lost, before a pass that cannot be completed otherwise
        stops all ranks. None: no state may be lost."""
        self._explicit_pass = False
        self._callback_queued = False
        self._unsharded: set[Unit] = set()
        self._writable: set[Unit] = set()
        """Units in the contexts of `unsharded_parameters`."""
        self._naming = False
        self._unit_of = {
            id(p): unit for unit in self.units for f in unit.flats for p in f.parameters
        }
        self._in_early_forward = False
        self.before_implicit_step: Callable[[], None] = _do_nothing
        """Called before the first backward of a step in the user's own loop; it may raise."""
        self.uneven_samples: tuple[int, ...] | None = None
        """Samples of the ranks under an uneven plan, which a backward of weight 1 / n violates."""
        self._placeholders: dict[FlatParameter, list[Tensor]] | None = None
        self._has_placeholders = False
        """`.grad` of some parameters is a placeholder, which the next pass must not add to."""
        self._modules = {id(module) for module in model.modules()}
        self._call_depth = 0
        """Modules of the model whose forward is running, in one another."""
        self._visits: dict[Unit, int] = {}
        self._newest_hook = -1
        self.recomputation = Recomputation(model, blocks, self._unshards_before_forwards())
        self.hooks: list[Removable] = [
            *self._register_hooks(),
            self.recomputation,
        ]
        """They hold a reference to the engine until the owner removes them."""

    @property
    def flats(self) -> list[FlatParameter]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def trained(self) -> list[FlatParameter]:
        return [flat for unit in self.units for flat in unit.trained]

    # A step.

    def begin_step(self, *, keep_gradients: bool = False) -> None:
        """Reset the state of the previous step, except `.grad` if the user has just set it."""
        self.strategy.begin_step()
        self._run_gradient_hooks_last()
        for flat in self.trained:
            flat.begin_step()
            if not keep_gradients:
                self.strategy.free_gradient(flat)
        if not keep_gradients:
            self.drop_parameter_gradients()
        self.step = StepState()

    def _run_gradient_hooks_last(self) -> None:
        """Run the engine's hooks after those that were registered since the last step."""
        if RemovableHandle.next_id == self._newest_hook:
            return
        with direct_access():
            for flat in self.trained:
                flat.run_hooks_last()
        self._newest_hook = RemovableHandle.next_id

    @property
    def has_gradients(self) -> bool:
        """Whether a pass has contributed to this step."""
        return self.step.phase >= Phase.ACCUMULATED

    @contextmanager
    def early_forward(self) -> Iterator[None]:
        """A context for a forward whose weight is not known yet. It must not run a backward."""
        self._in_early_forward = True
        try:
            yield
        finally:
            self._in_early_forward = False

    def begin_pass(
        self, *, weight: float, leader: int | None, last: bool, mode: Mode = Mode.TRAIN
    ) -> bool:
        """Open a pass; close it with `end_pass`. Collective if it unshards or reduces.

        Args:
            weight: factor for this rank's mean gradient of the pass.
            leader: first rank that has samples in the pass; None if no rank has.
            last: whether it is this rank's last pass of the step.

        Returns:
            False if there is nothing to issue: no rank has samples and no order has been agreed
            yet, or all parameters are unsharded anyway.
        """
        if self._has_placeholders:
            self.drop_parameter_gradients()
        if self.has_early_pass:
            self.has_early_pass = False
            self.scheduler.current.set_weight(weight)
            return True
        if mode is Mode.EVALUATE and len(self._unsharded) == len(self.units):
            return False
        reduces = mode.has_gradients and (last or self.strategy.reduces_every_pass)
        if leader is None:
            if not self.scheduler.has_order(mode, reduces):
                return False
            leader = 0
        self._explicit_pass = True
        self.scheduler.begin(PassSettings(mode, reduces, weight), leader)
        return True

    def begin_early_pass(self) -> bool:
        """Open the first pass of a step before its weight is known. Collective.

        `begin_pass` then sets the weight, or `end_pass(failed=True)` closes the pass with zeros.

        Returns:
            False, on all ranks, if the collective order has not been agreed yet.
        """
        busy = self.scheduler.active or bool(self._unsharded)
        if busy or not self.scheduler.has_order(Mode.TRAIN, True):
            return False
        self.begin_step()
        self.begin_pass(weight=0.0, leader=0, last=False)
        self.has_early_pass = True
        return True

    def end_pass(self, *, failed: bool = False) -> None:
        """Close the open pass. After a failure its remaining slots get zeros. Collective.

        Raises:
            Exception: an error of this rank. The pass has been completed with zeros, so the other
                ranks do not wait.
            CollectiveTimeout: the pass could not be completed even with zeros.
        """
        own = self.scheduler.current
        has_gradients = own.mode.has_gradients
        try:
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
            self._drop_pass()
        if has_gradients:
            phase = Phase.ISSUED if own.reduces else Phase.ACCUMULATED
            self.step.phase = max(self.step.phase, phase)

    def _complete(self, complete: Callable[[], None]) -> None:
        """Complete what other ranks wait for, after an error; stop all ranks if that fails too."""
        try:
            if self.scheduler.active and self.scheduler.current.interrupted_by is not None:
                raise self.scheduler.current.interrupted_by
            complete()
        except CollectiveTimeout:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                reason = f"rank {self.comm.group.rank}: a pass cannot be completed after {error!r}"
                self.stop_all_ranks(reason)
                raise CollectiveTimeout(reason) from error
            if self.free_state is not None:
                self.free_state()
                self.free_state = None
                self._complete(complete)
                return
            reason = (
                f"rank {self.comm.group.rank} is out of memory and cannot complete a pass even "
                f"without gradients; give it fewer samples or a smaller share: {error}"
            )
            self.stop_all_ranks(reason)
            raise CollectiveTimeout(reason) from error

    def drop_parameter_gradients(self) -> None:
        """Set `.grad` of all parameters to None, as at the start of a step."""
        self._has_placeholders = False
        for flat in self.trained:
            flat.drop_parameter_gradients()

    def set_placeholder_gradients(self, flats: Collection[FlatParameter]) -> None:
        """Set `.grad` of these flat parameters to tensors that raise if they are used."""
        if self._placeholders is None:
            self._placeholders = {
                flat: [PlaceholderGradient(parameter) for parameter in flat.parameters]
                for flat in self.trained
            }
        self._has_placeholders = True
        with direct_access():
            for flat in flats:
                for parameter, placeholder in zip(
                    flat.parameters, self._placeholders[flat], strict=True
                ):
                    if parameter.grad is None:
                        parameter.grad = placeholder

    def stop_all_ranks(self, reason: str) -> None:
        """Make the later collectives of all ranks raise: this rank cannot go on with them."""
        self.control.abort(reason)
        self.comm.abort(reason)

    def wait_for_reductions(self) -> None:
        """Wait until this rank's slice of the mean gradient is final. Collective."""
        if self.step.phase < Phase.REDUCED:
            try:
                self.strategy.wait_for_reductions(self.units)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                free_frames(error)
                self._complete(lambda: self.strategy.wait_for_reductions(self.units))
            self.step.phase = Phase.REDUCED

    def finish_gradients(self) -> None:
        """Wait until the gradient is final wherever the update and the user read it. Collective."""
        self.wait_for_reductions()
        if self.step.phase < Phase.FINAL:
            self.strategy.finish_gradients(self.units)
            self.step.phase = Phase.FINAL
            if not self.strategy.shows_gradients and not self.step.in_train_step:
                self.set_placeholder_gradients(self.trained)

    def empty_gradients(self) -> list[Tensor]:
        """Memory for `full_gradients`."""
        dtype = torch.float32
        return [torch.empty(flat.numel, dtype=dtype, device=flat.device) for flat in self.trained]

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

    def abort(self) -> None:
        """Drop the open pass after a collective has failed."""
        self._drop_pass()

    def _drop_pass(self) -> None:
        self._explicit_pass = self.has_early_pass = False
        self._callback_queued = False  # a backward that fails does not call back
        self.scheduler.drop()

    def explain_error(self, error: Exception) -> Exception:
        """Explain autograd's version error where its cause is a resharded parameter."""
        is_version_error = "modified by an inplace operation" in str(error)
        if not self.strategy.shards_parameters or not is_version_error:
            return error
        explained = RuntimeError(
            f"rank {self.comm.group.rank}: the backward read parameters of a unit before it "
            "reached the unit's outputs, while they were sharded (stage 3). Possible causes: a "
            "loss stored in a module, a second-order gradient, or reentrant checkpointing. Return "
            "such a loss as an output of the unit, name a larger unit that contains its use "
            "(units=[...]), or use stage 2. If the model does change a parameter in place, that is "
            f"the cause: {error}"
        )
        explained.__cause__ = error
        return explained

    def reduce_without_backward(self) -> None:
        """Reduce `.grad` and the accumulated gradients as a last pass. Collective.

        Raises:
            RuntimeError, TypeError: a gradient that was set cannot be reduced.
        """
        for flat in self.trained:
            flat.check_gradients()
        weight = 1.0 / self.comm.group.size
        self.begin_pass(weight=weight, leader=0, last=True, mode=Mode.REDUCE_ONLY)
        self.end_pass()
        self.wait_for_reductions()

    # Values.

    def reject_open_pass(self) -> None:
        """Raise in a pass, in which parameters cannot be unsharded for the user."""
        if self.scheduler.active:
            raise RuntimeError(
                f"rank {self.comm.group.rank}: full_parameters() inside a pass; end the backward "
                "first. After a forward without a backward, call zero_grad(); run forwards that "
                "need none under torch.no_grad()"
            )

    @contextmanager
    def unsharded_parameters(
        self, *, writeback: bool, units: Sequence[Unit] | None = None
    ) -> Iterator[None]:
        """A context in which units are unsharded, by default all. Collective at both ends."""
        self.reject_open_pass()
        wanted = self.units if units is None else units
        added = [unit for unit in wanted if unit not in self._unsharded]  # others: outer contexts
        writable = [u for u in wanted if u not in self._writable] if writeback else []
        shards_parameters = self.strategy.shards_parameters
        if shards_parameters:
            self._allocate_lasting(added)
            for unit in added:
                self.strategy.unshard(unit, in_step=False, lasting=True)
            for unit in added:
                self.strategy.wait_for_unshard(unit)
        self._unsharded.update(added)
        self._writable.update(writable)
        try:
            yield
        finally:
            self._unsharded.difference_update(added)
            self._writable.difference_update(writable)
            if writeback:
                for flat in (flat for unit in wanted for flat in unit.flats):
                    self.strategy.store_values(flat)
            if shards_parameters:
                for unit in added:
                    self.strategy.reshard(unit)

    def _allocate_lasting(self, units: Sequence[Unit]) -> None:
        """Allocate the values of units outside of passes, on all ranks or on none. Collective."""

        def allocate() -> None:
            # Values written there must reach later passes only through the shards.
            self.strategy.reshard_persistent()
            for unit in units:
                self.strategy.allocate_lasting(unit)

        try:
            run_on_all_ranks(self.control, allocate, doing="unsharding the parameters")
        except BaseException:
            for unit in units:
                self.strategy.reshard(unit)
            raise

    def units_of(self, modules: Sequence[str | nn.Module]) -> tuple[Unit, ...]:
        """The units that have parameters of these modules, given by themselves or by name.

        Raises:
            ValueError: the model has no such module.
        """
        names = dict(self.model.named_modules(remove_duplicate=False))
        found: set[Unit] = set()
        for module in modules:
            chosen = names.get(module) if isinstance(module, str) else module
            if chosen is None or id(chosen) not in self._modules:
                raise ValueError(
                    f"modules: {module!r} is not in the model; give its modules, or their names as "
                    "named_modules() lists them"
                )
            units = (self._unit_of.get(id(parameter)) for parameter in chosen.parameters())
            found.update(unit for unit in units if unit is not None)
        return tuple(unit for unit in self.units if unit in found)

    @contextmanager
    def naming_parameters(self) -> Iterator[None]:
        """A context in which `state_dict` may be called for its names while values are sharded."""
        self._naming = True
        try:
            yield
        finally:
            self._naming = False

    @property
    def values_are_readable(self) -> bool:
        """Whether every parameter is unsharded on this rank now."""
        return not self.strategy.shards_parameters or len(self._unsharded) == len(self.units)

    def is_sharded(self, unit: Unit) -> bool:
        """Whether this rank has only its share of a unit's values now."""
        return self.strategy.shards_parameters and unit not in self._unsharded

    @property
    def has_unsharded_units(self) -> bool:
        """Inside `unsharded_parameters`, at stages that shard parameters."""
        return bool(self._unsharded) and self.strategy.shards_parameters

    def may_read(self, module: nn.Module) -> bool:
        """Whether a module's own parameters are unsharded, or only their names matter."""
        return self._naming or self._are_in(module, self._unsharded)

    def may_write(self, module: nn.Module) -> bool:
        """Whether values written into a module's own parameters now take effect."""
        return self._are_in(module, self._writable)

    def _are_in(self, module: nn.Module, units: set[Unit]) -> bool:
        if not self.strategy.shards_parameters:
            return True
        own = (self._unit_of.get(id(parameter)) for parameter in module._parameters.values())
        return all(unit is None or unit in units for unit in own)

    # Hooks.

    def _register_hooks(self) -> Iterator[Removable]:
        for unit in self.units:
            for flat in unit.trained:
                yield from flat.watch(self._gradient_hook(flat))
        if not self.strategy.shards_parameters:
            return
        for unit in self.units:
            for module in unit.modules:
                yield module.register_forward_pre_hook(self._forward_pre_hook(unit), prepend=True)
                if not unit.resident:
                    yield module.register_forward_hook(self._forward_hook(unit))
        entry, leave = _disable_compile(self._enter_call), _disable_compile(self._leave_call)
        for module in self._modules_with_units():
            yield module.register_forward_pre_hook(entry, prepend=True)
            yield module.register_forward_hook(leave, always_call=True)

    def _modules_with_units(self) -> Iterator[nn.Module]:
        """The modules of units, and those that contain them."""
        inner = {id(module) for unit in self.units for module in unit.modules}
        for module in self.model.modules():
            if any(id(part) in inner for part in module.modules()):
                yield module

    def _unshards_before_forwards(self) -> dict[nn.Module, Callable[..., None]]:
        """By module, what its forward needs before it runs, also if it runs again."""
        if not self.strategy.shards_parameters:
            return {}
        return {
            module: self._forward_pre_hook(unit) for unit in self.units for module in unit.modules
        }

    def _gradient_hook(self, flat: FlatParameter) -> Callable[[nn.Parameter], None]:
        def gradient_ready(parameter: nn.Parameter) -> None:
            if self._in_early_forward:
                raise RuntimeError(
                    f"rank {self.comm.group.rank}: loss_fn ran a backward, but it must only return "
                    "the loss; train_step runs the one backward of each micro-batch"
                )
            if not self._explicit_pass:
                self.reject_uneven_backward()
            is_last = True
            if not self.scheduler.active:
                hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
                is_last = gradient_ready not in hooks or hooks[-1] is gradient_ready
                self._begin_implicit_pass(Mode.TRAIN)
            if not is_last:  # only in this pass: take the gradient when the later hooks have run
                take = partial(self.scheduler.current.gradient_ready, flat, parameter)
                Variable._execution_engine.queue_callback(take)
            calls_back = not self._explicit_pass or self.step.in_user_loop
            if calls_back and not self._callback_queued:
                self._callback_queued = True
                Variable._execution_engine.queue_callback(self._on_backward_end)
            if is_last:
                self.scheduler.current.gradient_ready(flat, parameter)

        return gradient_ready

    def _forward_pre_hook(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, _inputs: Any) -> None:
            if unit in self._unsharded or id(module) not in self._modules:
                return  # already unsharded, or a copy of the model, which has its own parameters
            reject_forward_in_replay()
            if self._unsharded:
                raise RuntimeError(
                    f"rank {self.comm.group.rank}: a forward needs unit {unit.name!r}, which is "
                    "sharded inside full_parameters(modules=...); add its modules there"
                )
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise RuntimeError(self._explain_transform(unit))
            if not self._explicit_pass:
                mode = Mode.TRAIN if self._records_gradients() else Mode.EVALUATE
                if mode is Mode.TRAIN and self._implicit_evaluation_is_open:
                    self.drop_implicit_pass()
                if not self.scheduler.active:
                    self._begin_implicit_pass(mode)
            try:
                if _in_backward():
                    self.scheduler.current.require(
                        unit
                    )  # recomputation for activation checkpointing
                else:
                    self._visits[unit] = self.scheduler.current.enter_forward(unit)
            except CollectiveTimeout as error:
                if self._explicit_pass:
                    raise
                raise self._explain_timeout(error) from error

        return _disable_compile(enter)

    def _forward_hook(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
            if unit in self._unsharded or id(module) not in self._modules:
                return
            if _in_backward() or not torch.is_grad_enabled():
                return
            visit = self._visits[unit]
            # A tensor that a unit returns unchanged belongs to the unit that created it: its
            # gradient is computed after the backward has left all later units.
            outputs = [
                value
                for value in pytree.tensors(output)
                if value.requires_grad and self.scheduler.current.is_first_output(value)
            ]

            def enter_backward(_gradient: Tensor) -> None:
                if not self._explicit_pass:
                    self.reject_uneven_backward()
                self.scheduler.current.enter_backward(unit, visit)

            if outputs:
                self.scheduler.current.expect_backward(unit, visit)
            for value in outputs:
                value.register_hook(enter_backward)

        return _disable_compile(leave)

    def _records_gradients(self) -> bool:
        """Whether a forward that begins now may be followed by a backward to the parameters."""
        with direct_access():
            return torch.is_grad_enabled() and any(
                parameter.requires_grad for flat in self.trained for parameter in flat.parameters
            )

    def _enter_call(self, module: nn.Module, _inputs: Any) -> None:
        self._call_depth += id(module) in self._modules

    def _leave_call(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """At the end of the outermost call, which may be of a part of the model."""
        if id(module) not in self._modules:
            return
        self._call_depth = max(0, self._call_depth - 1)
        if self._call_depth or not self._implicit_evaluation_is_open:
            return
        self.scheduler.finish()
        if torch.is_grad_enabled() and any(v.requires_grad for v in pytree.tensors(output)):
            raise RuntimeError(
                f"rank {self.comm.group.rank}: no parameter of this model requires a gradient, but "
                "its output does, and a backward through it needs the parameters, which are "
                "sharded (stage 3). Where it is part of another model's loss (discriminator, "
                "reward model, teacher), enter `with optimizer.full_parameters():` of its own "
                "optimizer on every rank around that step, or call it under torch.no_grad()"
            )

    @property
    def _implicit_evaluation_is_open(self) -> bool:
        own = self.scheduler.active and not self._explicit_pass
        return own and self.scheduler.current.mode is Mode.EVALUATE

    def drop_implicit_pass(self) -> None:
        """End an implicit pass that has no natural end, such as a forward without a backward.

        Collective if such a pass is open.
        """
        self._call_depth = 0  # a forward may have failed before its hooks ran
        if self.scheduler.active and not self._explicit_pass:
            mode = self.scheduler.current.mode
            self.scheduler.finish(failed=True)
            self._callback_queued = False
            if mode is not Mode.EVALUATE:  # an evaluation leaves no gradients
                self.begin_step()

    def _explain_transform(self, unit: Unit) -> str:
        return (
            f"rank {self.comm.group.rank}: a transform of torch.func (jvp, vmap, grad, ...) called "
            f"unit {unit.name!r}, whose parameters are sharded (stage 3) and cannot be gathered "
            "inside a transform; train with stage 2. Without a training step, enter `with "
            "optimizer.full_parameters():` on every rank"
        )

    def _explain_timeout(self, error: CollectiveTimeout) -> CollectiveTimeout:
        """Name the likely cause of a timeout in a forward outside `train_step`."""
        return CollectiveTimeout(
            f"{error}. If the other ranks are alive, they did not run this forward: at stage 3 the "
            "parameters are sharded, so every rank must call the model. To run it on one rank, "
            "enter `with optimizer.full_parameters():` on all ranks first"
        )

    def _begin_implicit_pass(self, mode: Mode) -> None:
        """Open a pass for the user's own loop, in which all ranks have samples."""
        if mode is Mode.TRAIN and self.step.phase >= Phase.REDUCED:
            raise RuntimeError(
                f"rank {self.comm.group.rank}: a backward after the gradients of this step were "
                "reduced; call step() and zero_grad() first, or run all but the last backward of a "
                "step in no_sync()"
            )
        if mode is Mode.TRAIN and not self.has_gradients:
            self.before_implicit_step()
            self.begin_step(keep_gradients=True)  # the first gradient is already in `.grad`
        reduces = mode is Mode.TRAIN and (
            self.requires_gradient_sync or self.strategy.reduces_every_pass
        )
        weight = 1.0 / self.comm.group.size
        self.scheduler.begin(PassSettings(mode, reduces, weight), leader=0)

    def reject_uneven_backward(self) -> None:
        """Raise if a backward outside of `micro_batches` has the wrong weight. Collective then.

        Raises:
            RuntimeError: the plan gives the ranks different numbers of samples.
        """
        if self.uneven_samples is None:
            return
        self.drop_implicit_pass()
        self.drop_parameter_gradients()
        raise RuntimeError(
            f"rank {self.comm.group.rank}: gradients from outside of micro_batches have the weight "
            f"1 / {self.comm.group.size}, but the plan gives the ranks {self.uneven_samples} "
            "samples, so the gradient would be wrong. Use optimizer.train_step(loss_fn, batch), or "
            "run the backward in `for micro_batch in optimizer.micro_batches(batch):`"
        )

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        if not self.scheduler.active:
            return
        if self._explicit_pass:
            self.set_placeholder_gradients(self.scheduler.current.reduced)
            return
        self.end_pass()
        if self.requires_gradient_sync:
            self.finish_gradients()


def _disable_compile(hook: Callable[..., None]) -> Callable[..., None]:
    """Exclude a hook from `torch.compile`: it communicates, so it runs between graphs."""
    return ModelHook(torch.compiler.disable(hook))


def _do_nothing() -> None:
    """Checks nothing."""


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
