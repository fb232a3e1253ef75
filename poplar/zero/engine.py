"""The engine: a model's units under one strategy, and the hooks that tell when one is needed.

Passes are explicit (`pass_begin`, `pass_end`) where `train_step` or `micro_batches` own the loop. A
backward that comes on its own is a pass too: it begins at its first unit or gradient and ends when
autograd does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from poplar.comm import Communicator, Control
from poplar.data import pytree
from poplar.errors import PoplarError
from poplar.zero.collective_scheduler import CollectiveScheduler, Mode
from poplar.zero.flat_parameter import Flat
from poplar.zero.replicated import Replicated
from poplar.zero.sharded_gradients import ShardedGradients
from poplar.zero.sharded_optimizer import ShardedOptimizer
from poplar.zero.sharded_parameters import ShardedParameters
from poplar.zero.strategy import Strategy
from poplar.zero.unit import Unit

STRATEGIES: tuple[type[Strategy], ...] = (
    Replicated,
    ShardedOptimizer,
    ShardedGradients,
    ShardedParameters,
)
"""By ZeRO stage."""


class Engine:
    """One model on this rank. Collective methods say so; all others are local."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        strategy: Strategy,
        comm: Communicator,
        control: Control,
    ) -> None:
        self.model = model
        self.units = tuple(units)
        self.strategy = strategy
        self.comm = comm
        self.control = control
        strategy.expect(self.units)
        self.scheduler = CollectiveScheduler(self.units, strategy, control)
        self.syncs = True
        """A backward of its own is the step's last (False inside `no_sync`)."""
        self._owned_pass = False
        self._ending = False
        self._passes_to_reduce = False
        self.reduced = False
        """This step's last reduction has been issued."""
        self.settled = False
        """What the layouts give this rank of the step's mean gradient is final."""
        self._completed = False
        self._all_shown = self._writeback = False
        self._runs_ahead = False
        self._modules = {id(module) for module in model.modules()}
        self._depth = 0
        self._visits: dict[Unit, int] = {}
        self.hooks: list[RemovableHandle] = list(self._register_hooks())
        """Keep this engine alive; who owns it removes them when it goes."""

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def trained(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.trained]

    # A step.

    def begin_step(self, *, keep_gradients: bool = False) -> None:
        """Forget what the step before left behind, but `.grad` if the user has just set it."""
        self.strategy.begin_step()
        for flat in self.trained:
            flat.used.clear()
            if keep_gradients:
                continue
            for parameter in flat.parameters:
                parameter.grad = None
            self.strategy.drop_gradient(flat)
        self.reduced = self.settled = self._completed = self._passes_to_reduce = False

    @property
    def has_gradients(self) -> bool:
        """A pass has contributed to this step."""
        return self.reduced or self._passes_to_reduce

    @contextmanager
    def running_ahead(self) -> Iterator[None]:
        """A forward in this block comes before its pass: no backward belongs in there."""
        self._runs_ahead = True
        try:
            yield
        finally:
            self._runs_ahead = False

    def pass_begin(
        self, *, weight: float, leader: int | None, last: bool, mode: Mode = Mode.TRAIN
    ) -> bool:
        """Open a pass whose end is announced by `pass_end`. Collective where it gathers or reduces.

        Args:
            weight: what this pass's mean gradient counts for in the step.
            leader: first rank that has samples in it; None if no rank has.
            last: this rank's last pass of the step.

        Returns:
            False if there is nothing to play: no rank has samples and no order has been agreed yet,
            or all values are there anyway.
        """
        if mode is Mode.EVALUATE and self._all_shown:
            return False
        reduces = mode is not Mode.EVALUATE and (last or self.strategy.reduces_every_pass)
        if leader is None:
            if not self.scheduler.knows(mode, reduces):
                return False
            leader = 0
        self._owned_pass = True
        self.scheduler.begin(mode, reduces=reduces, weight=weight, leader=leader)
        return True

    def pass_end(self, *, failed: bool = False) -> None:
        """Close the open pass; after a failure the rest of it is played with zeros. Collective.

        Raises:
            torch.OutOfMemoryError: of this rank, when the pass is over nevertheless: others wait
                for its part of it.
            PoplarError: there was no memory even for that.
        """
        has_gradients = self.scheduler.mode is not Mode.EVALUATE
        try:
            try:
                self.scheduler.finish(failed=failed)
            except torch.OutOfMemoryError as short:
                traceback.clear_frames(short.__traceback__)
                self._end_without_room()
                raise
        finally:
            self._owned_pass = False
            self.scheduler.active = False
        if has_gradients:
            self._passes_to_reduce = True
            self.reduced = self.reduced or self.scheduler.reduces

    def _end_without_room(self) -> None:
        """Play the rest of the pass with zeros, for which there is less to hold."""
        try:
            self.scheduler.finish(failed=True)
        except torch.OutOfMemoryError as short:
            raise PoplarError(
                f"rank {self.comm.group.rank} has no memory left, not even to take part in the "
                "rest of a pass without gradients, so the other ranks wait for it until their "
                f"deadline; give it fewer samples or a smaller share: {short}"
            ) from short

    def settle(self) -> None:
        """Wait until what the layouts give this rank of the mean gradient is final. Collective."""
        if not self.settled:
            self.strategy.settle(self.units)
            self.settled = True

    def complete(self) -> None:
        """Settle, and wait until the gradient is wherever the update and the user read it."""
        self.settle()
        if not self._completed:
            self.strategy.complete(self.units)
            self._completed = True

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter with its mean gradient, gathered. Collective, once complete."""
        for flat in self.trained:
            whole = torch.empty(flat.numel, dtype=torch.float32, device=flat.device)
            own = flat.layout.bounds(self.comm.group.rank)
            part = flat.restrict(*own)
            if part is not None:
                whole[own[0] : own[1]].copy_(flat.gradient[part])
            what = f"the gradients of {flat.name}"
            self.comm.all_gather(whole, flat.layout, what=what).wait()
            places = zip(flat.names, flat.parameters, flat.offsets, strict=True)
            for name, parameter, offset in places:
                yield name, whole[offset : offset + parameter.numel()].view(parameter.shape)

    def abort(self) -> None:
        """After a collective failed there is nothing to play any more: drop the open pass."""
        self._owned_pass = False
        self.scheduler.active = False

    def explain(self, error: Exception) -> Exception:
        """Say what autograd's complaint about a version means where parameters come and go."""
        if not self.strategy.gathers or "modified by an inplace operation" not in str(error):
            return error
        explained = RuntimeError(
            f"rank {self.comm.group.rank}: the backward read parameters of a unit before it came "
            "to the unit's outputs, when they are not gathered (stage 3): by a loss kept aside in "
            "a module, a second-order gradient, or reentrant checkpointing. Return such a loss as "
            "an output of the unit, name a larger unit that contains its use (units=[...]), or use "
            f"stage 2. If the model does change a parameter in place, that is the cause: {error}"
        )
        explained.__cause__ = error
        return explained

    def reduce_without_backward(self) -> None:
        """Reduce what lies in `.grad` and in the sums, as a last pass. Collective."""
        weight = 1.0 / self.comm.group.size
        self.pass_begin(weight=weight, leader=0, last=True, mode=Mode.GIVEN)
        self.pass_end()
        self.settle()

    # Values.

    @contextmanager
    def all_values(self, *, writeback: bool) -> Iterator[None]:
        """Gather everything for the time of a `with` block. Collective at both ends."""
        if self.scheduler.active:
            raise RuntimeError("full_parameters() inside a pass; end the backward first")
        if self._all_shown:  # inside another such block: that one gives the values back
            outer, self._writeback = self._writeback, self._writeback or writeback
            try:
                yield
            finally:
                if writeback:
                    self._store_all()
                self._writeback = outer
            return
        gathers = self.strategy.gathers
        if gathers:
            # What is written in the block must not reach a later pass but through the shards.
            self.strategy.release_kept()
            for unit in self.units:
                self.strategy.gather(unit, in_step=False)
            for unit in self.units:
                self.strategy.show(unit)
        self._all_shown, self._writeback = True, writeback
        try:
            yield
        finally:
            self._all_shown = self._writeback = False
            if writeback:
                self._store_all()
            if gathers:
                for unit in self.units:
                    self.strategy.release(unit)

    def _store_all(self) -> None:
        for flat in self.flats:
            self.strategy.store(flat)

    @property
    def values_are_readable(self) -> bool:
        """Every parameter is whole on this rank now."""
        return self._all_shown or not self.strategy.gathers

    @property
    def is_shown_whole(self) -> bool:
        """Inside `all_values`, at stages where that gathers."""
        return self._all_shown and self.strategy.gathers

    @property
    def values_are_writable(self) -> bool:
        """What is written into the parameters now stays."""
        return self._writeback or not self.strategy.gathers

    # Hooks.

    def _register_hooks(self) -> Iterator[RemovableHandle]:
        for unit in self.units:
            for flat in unit.trained:
                for parameter in flat.parameters:
                    yield parameter.register_post_accumulate_grad_hook(self._arrival(unit))
        if not self.strategy.gathers:
            return
        for unit in self.units:
            for module in unit.modules:
                yield module.register_forward_pre_hook(self._entry(unit), prepend=True)
                if not unit.resident:
                    yield module.register_forward_hook(self._exit(unit))
        entry, leave = _untraced(self._model_entry), _untraced(self._model_exit)
        yield self.model.register_forward_pre_hook(entry, prepend=True)
        yield self.model.register_forward_hook(leave, always_call=True)

    def _arrival(self, unit: Unit) -> Callable[[Tensor], None]:
        def gradient_arrived(parameter: Tensor) -> None:
            if not self.scheduler.active:
                self._begin_own(Mode.TRAIN)
            if not self._owned_pass and not self._ending:
                self._ending = True
                Variable._execution_engine.queue_callback(self._backward_over)
            self.scheduler.gradient_arrived(unit, parameter)  # type: ignore[arg-type]

        return gradient_arrived

    def _entry(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, _inputs: Any) -> None:
            if self._all_shown or id(module) not in self._modules:
                return  # values are there, or a copy of the model runs, which has its own
            if torch.is_grad_enabled() and self._own_evaluation_is_open:
                self.drop_own_pass()
            if not self.scheduler.active:
                self._begin_own(Mode.TRAIN if torch.is_grad_enabled() else Mode.EVALUATE)
            if _in_backward():
                self.scheduler.need(unit)  # recomputation for activation checkpointing
            else:
                self._visits[unit] = self.scheduler.visit(unit)

        return _untraced(enter)

    def _exit(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._all_shown or id(module) not in self._modules:
                return
            if _in_backward() or not torch.is_grad_enabled():
                return
            visit = self._visits[unit]
            # A tensor that only passes through belongs to the unit that made it: its gradient comes
            # when the backward has left all later ones.
            outputs = [
                value
                for value in pytree.tensors(output)
                if value.requires_grad and self.scheduler.is_new_output(value)
            ]

            def enter_backward(_gradient: Tensor) -> None:
                self.scheduler.revisit(unit, visit)

            if outputs:
                self.scheduler.expect_backward(unit, visit)
            for value in outputs:
                value.register_hook(enter_backward)

        return _untraced(leave)

    def _model_entry(self, module: nn.Module, _inputs: Any) -> None:
        self._depth += module is self.model

    def _model_exit(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._depth -= module is self.model
        if self._depth == 0 and self._own_evaluation_is_open:
            self.scheduler.finish()

    @property
    def _own_evaluation_is_open(self) -> bool:
        own = self.scheduler.active and not self._owned_pass
        return own and self.scheduler.mode is Mode.EVALUATE

    def drop_own_pass(self) -> None:
        """End a pass that began by itself and will not end so, a forward without a backward, say.

        Collective if there is one, as its beginning was.
        """
        if self.scheduler.active and not self._owned_pass:
            self.scheduler.finish(failed=True)
            self._ending = False
            if self.scheduler.mode is not Mode.EVALUATE:  # which has left nothing to forget
                self.begin_step()

    def _begin_own(self, mode: Mode) -> None:
        """A pass that nobody opened: the user's own loop, in which all ranks have samples."""
        if self._runs_ahead:
            raise RuntimeError(
                f"rank {self.comm.group.rank}: a backward inside of loss_fn, which is to return "
                "the loss; train_step runs the one backward of each micro-batch"
            )
        if mode is Mode.TRAIN and self.settled:
            raise RuntimeError(
                f"rank {self.comm.group.rank}: a backward after the gradients of this step were "
                "reduced; call step() and zero_grad() first, or run all but the last backward of a "
                "step in no_sync()"
            )
        if mode is Mode.TRAIN and not self.has_gradients:
            self.begin_step(keep_gradients=True)  # the first one is there already
        reduces = mode is Mode.TRAIN and (self.syncs or self.strategy.reduces_every_pass)
        weight = 1.0 / self.comm.group.size
        self.scheduler.begin(mode, reduces=reduces, weight=weight, leader=0)

    def _backward_over(self) -> None:
        self._ending = False
        if self._owned_pass or not self.scheduler.active:
            return
        self.pass_end()
        if self.syncs:
            self.complete()


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Under `torch.compile` a hook that talks to other ranks runs between graphs, not in one."""
    disabled: Callable[..., None] = torch.compiler.disable(hook)
    return disabled


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
