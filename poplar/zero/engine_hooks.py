"""What the engine hears of calls of the model and of autograd, and the passes that these open.

`train_step` and `micro_batches` open and close passes explicitly. Any other backward is an implicit
pass: it begins at its first unit or gradient and ends with autograd. The hooks tell the open pass
which unit runs and which gradients are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from poplar.data import pytree
from poplar.values.errors import CollectiveTimeout
from poplar.values.plan import Plan
from poplar.zero.absent_parameter import direct_access
from poplar.zero.checks.placeholder_gradient import SECOND_BACKWARD
from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.model_hook import EngineHook, ModelHook, Removable
from poplar.zero.passes.collective_pass import Mode, PassSettings, in_backward
from poplar.zero.steps.step_state import Phase
from poplar.zero.unit import Unit

if TYPE_CHECKING:
    from poplar.zero.engine import Engine


_refusals: list[Exception] = []
_all: WeakSet[EngineHooks] = WeakSet()
"""Of the models of all optimizers of this process."""


@contextmanager
def forwards_refused(error: Exception) -> Iterator[None]:
    """A context in which a forward that needs the other ranks raises."""
    _refusals.append(error)
    try:
        yield
    finally:
        _refusals.pop()


def raise_if_refused() -> None:
    """Raise the error of `forwards_refused`."""
    if _refusals:
        raise _refusals[-1]


class EngineHooks:
    """The hooks of one engine on its model."""

    def __init__(self, engine: Engine, check_step: Callable[[], None]) -> None:
        """`check_step`: called before the first backward of a step in the user's own loop; it may
        raise.
        """
        self._engine, self._check_step = engine, check_step
        self._scheduler, self._values = engine.scheduler, engine.values
        self._rank = engine.comm.group.name
        self._sharded = engine.strategy.sharded(engine.units)
        self._modules = {id(module) for module in engine.model.modules()}
        self._requires_gradient_sync = True
        """An implicit backward is the last of its step."""
        self._runs: Literal["", "loss_fn", "closure"] = ""
        """The user's function that is running, in which a backward may be wrong."""
        self.uneven_samples: tuple[int, ...] | None = None
        """Samples of the ranks under an uneven plan, which a backward of weight 1 / n violates."""
        self._all_run_every_pass = True
        """By the plan, every rank has samples in every pass of a step."""
        self._may_end = False
        """`zero_grad` has left an implicit pass open, and the next call may end it."""
        self._call_depth = 0
        """Modules of the model whose forward is running, in one another."""
        self._visits: dict[Unit, int] = {}
        self._newest_hook = -1
        _all.add(self)

    def follow(self, plan: Plan | None) -> None:
        """Refuse an implicit backward if the plan is uneven."""
        samples = () if plan is None else tuple(map(plan.samples, range(plan.world_size)))
        self.uneven_samples = samples if len(set(samples)) > 1 else None
        passes = () if plan is None else plan.micro_batches
        self._all_run_every_pass = len(set(map(len, passes))) <= 1 and all(map(all, passes))

    def set_requires_gradient_sync(self, requires: bool) -> bool:
        """Whether an implicit backward is the last of its step; returns what it was before."""
        before, self._requires_gradient_sync = self._requires_gradient_sync, requires
        return before

    @contextmanager
    def running(self, function: Literal["loss_fn", "closure"]) -> Iterator[None]:
        """A context for a function of the user: a backward in it raises, or says where it ran."""
        before, self._runs = self._runs, function
        try:
            yield
        finally:
            self._runs = before

    def run_gradient_hooks_last(self) -> None:
        """Run the engine's hooks after those that were registered since the last step."""
        if RemovableHandle.next_id == self._newest_hook:
            return
        with direct_access():
            for flat in self._engine.trained:
                flat.run_hooks_last()
        self._newest_hook = RemovableHandle.next_id

    def register(self) -> Iterator[Removable]:
        """Register the hooks, which refer to the engine until they are removed."""
        for flat in self._engine.trained:
            yield from flat.watch(self._gradient_hook(flat))
        for unit in self._sharded:
            for module in unit.modules:
                yield module.register_forward_pre_hook(self._forward_pre_hook(unit), prepend=True)
                if not unit.resident:
                    yield module.register_forward_hook(self._forward_hook(unit))
        entry, leave = EngineHook(self._enter_call), EngineHook(self._leave_call)
        for module in self._modules_with_units():
            yield module.register_forward_pre_hook(entry, prepend=True)
            yield module.register_forward_hook(leave, always_call=True)
        yield self._engine.model.register_forward_pre_hook(ModelHook(_reject_forward_in_ddp))

    def _modules_with_units(self) -> Iterator[nn.Module]:
        """The modules of units, and those that contain them."""
        inner = {id(module) for unit in self._sharded for module in unit.modules}
        for module in self._engine.model.modules():
            if any(id(part) in inner for part in module.modules()):
                yield module

    def before_forwards(self) -> dict[nn.Module, Callable[..., None]]:
        """By module, what its forward needs before it runs, also if it runs again."""
        hooks = {unit: self._forward_pre_hook(unit) for unit in self._sharded}
        return {module: hook for unit, hook in hooks.items() for module in unit.modules}

    def _gradient_hook(self, flat: FlatParameter) -> Callable[[nn.Parameter], None]:
        def gradient_ready(parameter: nn.Parameter) -> None:
            if self._runs == "loss_fn":
                raise RuntimeError(
                    f"rank {self._rank}: loss_fn ran a backward, but it must only return "
                    "the loss; train_step runs the one backward of each micro-batch"
                )
            engine, scheduler = self._engine, self._scheduler
            self._check_backward()
            is_last = True
            if not scheduler.active:
                hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
                is_last = gradient_ready not in hooks or hooks[-1] is gradient_ready
                self._begin_implicit_pass(Mode.TRAIN)
            if not is_last:  # only in this pass: take the gradient when the later hooks have run
                take = partial(scheduler.current.gradient_ready, flat, parameter)
                Variable._execution_engine.queue_callback(take)
            calls_back = not engine.pass_is_explicit or engine.step.in_user_loop
            if calls_back and scheduler.current.begin_backward():
                Variable._execution_engine.queue_callback(self._on_backward_end)
            if is_last:
                scheduler.current.gradient_ready(flat, parameter)

        return gradient_ready

    def _forward_pre_hook(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, _inputs: Any) -> None:
            if unit in self._values.present or id(module) not in self._modules:
                return  # already unsharded, or a copy of the model, which has its own parameters
            raise_if_refused()
            if self._values.present:
                raise RuntimeError(
                    f"rank {self._rank}: a forward needs unit {unit.name!r}, which is "
                    "sharded inside full_parameters(modules=...); add its modules there"
                )
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise RuntimeError(self._explain_transform(unit))
            if not self._engine.pass_is_explicit:
                if not in_backward():
                    self._end_unused_pass()
                mode = Mode.TRAIN if self._records_gradients() else Mode.EVALUATE
                if mode is Mode.TRAIN and self._implicit_evaluation_is_open:
                    self.drop_implicit_pass()
                if not self._scheduler.active:
                    self._begin_implicit_pass(mode)
            try:
                self._scheduler.current.unshard(unit)
                if not in_backward():  # else it is a recomputation of activation checkpointing
                    self._visits[unit] = self._scheduler.current.forward_began(unit)
            except CollectiveTimeout as error:
                if self._engine.pass_is_explicit:
                    raise
                raise self._explain_timeout(error) from error

        return EngineHook(enter)

    def _forward_hook(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
            if unit in self._values.present or id(module) not in self._modules:
                return
            if in_backward() or not torch.is_grad_enabled():
                return
            visit = self._visits[unit]
            # A tensor that a unit returns unchanged belongs to the unit that created it: its
            # gradient is computed after the backward has left all later units.
            outputs = [
                value
                for value in pytree.tensors(output)
                if value.requires_grad and self._scheduler.current.is_first_output(value)
            ]

            def enter_backward(_gradient: Tensor) -> None:
                self._check_backward()
                self._scheduler.current.enter_backward(unit, visit)

            if outputs:
                self._scheduler.current.expect_backward(unit, visit)
            for value in outputs:
                value.register_hook(enter_backward)

        return EngineHook(leave)

    def _records_gradients(self) -> bool:
        """Whether a forward that begins now may be followed by a backward to the parameters."""
        trained = (p for flat in self._engine.trained for p in flat.parameters)
        with direct_access():
            return torch.is_grad_enabled() and any(p.requires_grad for p in trained)

    def _enter_call(self, module: nn.Module, _inputs: Any) -> None:
        self._call_depth += id(module) in self._modules

    def _leave_call(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        """At the end of the outermost call, which may be of a part of the model."""
        if id(module) not in self._modules:
            return
        self._call_depth = max(0, self._call_depth - 1)
        if self._call_depth or not self._implicit_evaluation_is_open:
            return
        self._scheduler.finish()
        if torch.is_grad_enabled() and any(v.requires_grad for v in pytree.tensors(output)):
            raise RuntimeError(
                f"rank {self._rank}: no parameter of this model requires a gradient, but "
                "its output does, and a backward through it needs the parameters, which are "
                "sharded (stage 3). Where it is part of another model's loss (discriminator, "
                "reward model, teacher), enter `with optimizer.full_parameters():` of its own "
                "optimizer on every rank around that step, or call it under torch.no_grad()"
            )

    @property
    def _implicit_pass_is_open(self) -> bool:
        return self._scheduler.active and not self._engine.pass_is_explicit

    @property
    def _implicit_evaluation_is_open(self) -> bool:
        return self._implicit_pass_is_open and self._scheduler.current.mode is Mode.EVALUATE

    def drop_implicit_pass(self) -> None:
        """End an implicit pass that has no natural end, such as a forward without a backward.

        Collective if such a pass is open.
        """
        self._call_depth = 0  # a forward may have failed before its hooks ran
        if self._implicit_pass_is_open:
            self._abandon_pass()

    def _abandon_pass(self) -> None:
        mode = self._scheduler.current.mode
        self._scheduler.finish(failed=True)
        if mode is not Mode.EVALUATE:  # an evaluation leaves no gradients
            self._engine.begin_step()

    def leave_unused_pass(self) -> bool:
        """Leave an implicit pass open that waits for its backward, in a step without gradients.

        The next forward ends it, or the next method that all ranks call, if no backward comes
        before. Local.

        Returns:
            Whether there is one.
        """
        self._call_depth = 0  # as in `drop_implicit_pass`
        self._may_end = (
            self._implicit_pass_is_open
            and self._scheduler.current.mode is Mode.TRAIN
            and not self._scheduler.current.has_backward
            and not self._engine.has_gradients
        )
        return self._may_end

    def before_call(self, name: str) -> None:
        """A method that all ranks call begins. Collective, if it ends a pass."""
        if name != "zero_grad()":  # which may be called again before the backward
            self._end_unused_pass()

    def _end_unused_pass(self) -> None:
        """End the pass of `leave_unused_pass`, unless its backward has begun. Collective then.

        Gradients that the user has set since stay.
        """
        may_end, self._may_end = self._may_end, False
        if not (may_end and self._implicit_pass_is_open) or self._scheduler.current.has_backward:
            return
        parameters = [p for flat in self._engine.trained for p in flat.parameters]
        with direct_access():
            given = [parameter.grad for parameter in parameters]
        self._engine.drop_parameter_gradients()
        self._abandon_pass()
        with direct_access():
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient

    def _explain_transform(self, unit: Unit) -> str:
        return (
            f"rank {self._rank}: a transform of torch.func (jvp, vmap, grad, ...) called "
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
        engine = self._engine
        outer = self._outer_steps()
        if mode is Mode.EVALUATE:
            outer = [one for one in outer if not one._evaluates]
        if not all(one._all_run_every_pass for one in outer):  # ranks would wait for each other
            is_training = mode is Mode.TRAIN
            explain = self._explain_uneven if is_training else self._explain_forward
            raise RuntimeError(explain(outer))
        if mode is Mode.TRAIN and engine.step.phase >= Phase.REDUCED:
            raise RuntimeError(
                f"rank {self._rank}: {SECOND_BACKWARD}. Without micro_batches, run all but the "
                "last backward of a step in no_sync()"
            )
        if mode is Mode.TRAIN and not engine.has_gradients:
            self._check_step()
            engine.begin_step(keep_gradients=True)  # the first gradient is already in `.grad`
        reduces = mode is Mode.TRAIN and (
            self._requires_gradient_sync or engine.strategy.reduces_every_pass
        )
        weight = 1.0 / engine.comm.group.size
        self._may_end = False
        self._scheduler.begin(PassSettings(mode, reduces, weight), leader=0)

    def _check_backward(self) -> None:
        """Check what calls this first in a backward outside of explicit passes."""
        if self._engine.pass_is_explicit:
            return
        if not (self._scheduler.active and self._scheduler.current.has_backward):
            self.reject_uneven_backward()

    def reject_uneven_backward(self) -> None:
        """Raise if a backward outside of `micro_batches` has the wrong weight. Collective then.

        Inside of a step of another engine, that step decides, whose weights the gradients need.
        """
        outer = self._outer_steps()
        is_even = all(one._step_is_even for one in outer) if outer else self.uneven_samples is None
        if is_even:
            return
        self.drop_implicit_pass()
        self._engine.drop_parameter_gradients()
        raise RuntimeError(self._explain_uneven(outer))

    def _outer_steps(self) -> list[EngineHooks]:
        """The hooks of other engines that are in a pass now, or run their first forward before it.

        An implicit pass of this engine is then part of their steps.
        """
        others = (one for one in _all if one is not self)
        return [one for one in others if one._engine.pass_is_explicit or one._runs == "loss_fn"]

    @property
    def _evaluates(self) -> bool:
        """Whether the open pass is one of `evaluate`, whose batches no plan gives to the ranks."""
        return self._scheduler.active and self._scheduler.current.mode is Mode.EVALUATE

    @property
    def _step_is_even(self) -> bool:
        """Whether all passes of the step have the weight 1 / n, one on each of n ranks."""
        micro_batch = self._engine.step.open_micro_batch
        if micro_batch is None:  # the first forward may run before the step is opened
            return self.uneven_samples is None and self._all_run_every_pass
        return micro_batch.is_even

    def _explain_uneven(self, outer: Sequence[EngineHooks]) -> str:
        rank, own = f"rank {self._rank}", type(self._engine.model).__name__
        weight = f"have the weight 1 / {self._engine.comm.group.size}"
        if outer:
            around = ", around that step `with optimizer.full_parameters():` of its own optimizer,"
            return (
                f"{rank}: gradients of {own} from a step of the optimizer of another model, "
                f"{type(outer[0]._engine.model).__name__}, {weight}. They would be wrong unless "
                "every rank runs one pass in that step, with the same number of samples and "
                f"without weight= and loss=. Freeze this model, {own}, in that step: its "
                f"requires_grad_(False) before it{around if self._sharded else ''} and "
                "requires_grad_(True) before the step of its own optimizer"
            )
        source, fix = "outside of micro_batches", "Use optimizer.train_step(loss_fn, batch)"
        if self._runs == "closure":
            source = "a backward in the closure of step(), outside of micro_batches,"
            fix += " in place of step(closure)"
        return (
            f"{rank}: gradients of {own} from {source} {weight}, but the plan gives the ranks "
            f"{self.uneven_samples} samples, so the gradient would be wrong. {fix}, or run the "
            "backward in `for micro_batch in optimizer.micro_batches(batch):`"
        )

    def _explain_forward(self, outer: Sequence[EngineHooks]) -> str:
        return (
            f"rank {self._rank}: the parameters of {type(self._engine.model).__name__} are sharded "
            "(stage 3), and it is called in a step of the optimizer of another model, "
            f"{type(outer[0]._engine.model).__name__}, in which not every rank has samples in "
            "every pass, so the ranks would wait for each other. Enter `with "
            "optimizer.full_parameters():` of its own optimizer on every rank around that step"
        )

    def _on_backward_end(self) -> None:
        if not self._scheduler.active or self._waits_for_outer_backward():
            return
        if self._engine.pass_is_explicit:
            self._scheduler.current.end_backward()
            self._engine.set_placeholder_gradients(self._scheduler.current.packed)
            return
        self._engine.end_pass()
        if self._requires_gradient_sync:
            self._engine.finish_gradients()

    def _waits_for_outer_backward(self) -> bool:
        """Whether a backward ends that a node of another one has run: reentrant checkpointing.

        Then `_on_backward_end` is called again at the end of the outer one, whose next nodes run
        after this node. Only what they call can add a callback to it.
        """
        node = torch._C._current_autograd_node()
        following = () if node is None else (one for one, _ in node.next_functions if one)

        def continue_outside(_gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            Variable._execution_engine.queue_callback(self._on_backward_end)

        handles = [one.register_prehook(continue_outside) for one in following]
        return bool(handles)


def _reject_forward_in_ddp(model: nn.Module, _inputs: Any) -> None:
    """Forward pre-hook: reject DDP that was wrapped around the model afterwards."""
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if wrapper is not None and torch.is_grad_enabled():
        _reject_forward_in(wrapper, model)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph break, but only inside of DDP
def _reject_forward_in(wrapper: nn.Module, model: nn.Module) -> None:
    if any(module is model for module in wrapper.modules()):
        raise TypeError(
            "the model was wrapped in DistributedDataParallel after its HeteroZeroOptimizer was "
            "built; DDP averages gradients with equal weights a second time. Do not wrap or "
            "prepare the model (Accelerate, Lightning's strategy='ddp'): the optimizer replaces "
            "the wrapper"
        )
