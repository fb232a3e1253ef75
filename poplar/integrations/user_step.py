"""`UserStep`: one step of `UnequalPasses`, whose passes run in the user's loop.

A pass begins before the body of the loop and ends after it; in between, the body computes a loss
and calls `backward`.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from poplar.data import pytree
from poplar.system.autograd_graph import leaf_of, nodes_from
from poplar.values.errors import PoplarError, agreed
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.micro_batch_loop import MicroBatchLoop
from poplar.zero.micro_batch_loss import check_scalar
from poplar.zero.micro_batches import MicroBatch

if TYPE_CHECKING:
    from poplar.integrations.unequal_passes import UnequalPasses

DOING = "a step"
LOOP = "the loop over passes"


class UserStep:
    """One step of this rank: how far it has come."""

    def __init__(self, passes: UnequalPasses) -> None:
        self._passes, self._control = passes, passes._control
        self._rank = self._control.group.name
        self._stand_in = passes._stand_in()
        self._loop: weakref.ref[MicroBatchLoop] | None = None
        self.loss: Tensor | float = 0.0
        """This rank's part of the weighted loss."""
        self._is_running = False
        self._watches: list[RemovableHandle] = []
        self._context = ExitStack()
        """Of the pass that the body runs."""
        self._open: MicroBatch | None = None
        """Its input, until its backward."""
        self._was_called = False
        """The model was called in this step."""
        self._has_run = False
        """It has run in the open pass."""
        self._in_backward = False
        self._in_last_backward = False
        """The last backward has begun: a failure can no longer be reported by the loop."""
        self._parameters = list(passes._model.parameters())
        self._holding: nn.Parameter | None = None
        """A parameter that has a gradient of earlier passes of this step."""

    # As `UserPasses`.

    @property
    def left_early(self) -> str:
        """What the other ranks are told if the loop was left before its end."""
        return f"rank {self._rank} left the loop over its passes before its end"

    @property
    def has_open_pass(self) -> bool:
        """Whether a pass has begun whose backward has not run."""
        return self._open is not None

    def enter_user_loop(self, loop: MicroBatchLoop) -> None:
        """The step has been opened, and its passes are those of `loop`."""
        self._loop, self._is_running = weakref.ref(loop), True
        called = self._passes._called
        self._watches = [
            called.register_forward_pre_hook(self._watch_calls),
            called.register_forward_hook(self._watch_outputs),
        ]

    def begin_user_pass(self, micro_batch: MicroBatch, rest: Sequence[MicroBatch]) -> bool:
        """Begin a pass, also one without samples: the engine needs it of every rank."""
        self._open, self._has_run = micro_batch, False
        self._context.enter_context(self._passes._pass(micro_batch.last))
        return True

    def end_user_pass(self, rest: Sequence[MicroBatch]) -> None:
        """End the pass of the body, if there is one.

        Raises:
            RuntimeError: it had no backward, or gradients of earlier passes were dropped.
        """
        try:
            if self._open is not None:
                raise RuntimeError(self._without_backward())
            if rest:
                self._check_gradients_are_kept()
        except RuntimeError as error:
            self.abandon(rest, error)
            raise
        self._context.close()

    def finish_user_passes(self) -> None:
        """All passes have ended."""
        self._end(has_failed=False)

    def _end(self, *, has_failed: bool) -> None:
        self._context.close()
        for watch in self._watches:
            watch.remove()
        self._open, self._is_running = None, False
        self._parameters, self._holding = [], None
        self._passes._end_step(has_failed)

    def abandon(self, rest: Sequence[MicroBatch], reason: Exception) -> None:
        """Drop the gradients, and report `reason` to the other ranks."""
        told = str(reason)
        try:
            if not self._in_last_backward:  # else the other ranks have raised, too
                self._in_last_backward = True
                told = self._report(reason)
        finally:
            self._end(has_failed=True)
        if isinstance(reason, PoplarError):  # nothing is raised after a break
            warnings.warn(f"{told}, so the gradients of this step were dropped", stacklevel=4)

    def _report(self, reason: Exception) -> str:
        """Report a failure of this rank; returns why the step ends."""
        if self._stand_in is None:
            return self._passes._stop(LOOP, reason)
        self._stand_in(self._was_called)
        try:
            raise_on_any_error(self._control, reason, doing=DOING)
        except Exception as error:
            if error is not reason:
                raise
        return str(reason)

    # For `UnequalPasses`.

    def check_ended(self) -> None:
        """Raise if the loop of this step still runs, and abandon the step on all ranks.

        Raises:
            RuntimeError: it does.
        """
        loop = self._loop() if self._loop is not None else None
        if loop is not None and loop.is_running:
            loop.close(_STEP_INSIDE_LOOP, why=_STEP_INSIDE_LOOP)
            raise RuntimeError(_STEP_INSIDE_LOOP)

    def backward(self, loss: Tensor) -> None:
        """As `UnequalPasses.backward`."""
        try:
            self._backward(loss)
        except BaseException as error:
            if self._stand_in is not None and not self._in_last_backward:
                agreed(error)  # the loop reports it
            raise

    def _backward(self, loss: Tensor) -> None:
        micro_batch = self._open
        if micro_batch is None:
            raise RuntimeError(outside_of_the_loop(self._rank))
        if not self._has_run:
            raise RuntimeError(
                f"rank {self._rank}: the model that UnequalPasses was given has not run in this "
                f"pass, so {self._passes.engine} would not reduce its gradients; compute the loss "
                "with that model, and give UnequalPasses the compiled one if you compile it"
            )
        check_scalar(loss, prefix=f"rank {self._rank}: ")
        self._check_gradients_are_kept()
        self._in_last_backward = micro_batch.last
        self._in_backward = True
        try:
            with self._passes._backward(micro_batch.last):
                self._run_backward(loss, micro_batch)
        finally:
            self._in_backward = False
        if micro_batch.last and self._stand_in is not None:
            raise_on_any_error(self._control, None, doing=DOING)
        self._open = None
        self._holding = next((p for p in self._parameters if p.grad is not None), None)

    def _run_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        if micro_batch.weight and micro_batch.samples:
            # The engine divides by the number of ranks.
            factor = micro_batch.weight * self._control.group.size
            if _rounds(factor, loss.dtype):
                warnings.warn(_ROUNDED, stacklevel=4)
            (loss * factor).backward()
            self.loss = self.loss + loss.detach().double() * micro_batch.weight
        else:
            with gradients_zeroed(loss):
                loss.backward()

    # Checks.

    def _watch_calls(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook."""
        self._was_called = True

    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook: a backward that has no weight fails before the engine communicates."""
        self._has_run = True

        def check(gradient: Tensor) -> None:
            if not self._is_running or self._in_backward or not _backward_accumulates():
                return
            if self._open is not None:
                raise RuntimeError(self._without_backward())
            raise RuntimeError(
                f"rank {self._rank}: a second backward in the loop body, whose gradient has no "
                "weight; add the losses and call passes.backward(loss) once for each micro-batch"
            )

        for tensor in pytree.tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(check)

    def _without_backward(self) -> str:
        return (
            f"rank {self._rank}: the loop body did not call passes.backward(loss), which gives the "
            "gradient of this pass its weight; call it instead of loss.backward(), once for each "
            "micro-batch"
        )

    def _check_gradients_are_kept(self) -> None:
        """Raise if the loop body has dropped the gradients of the passes before."""
        if self._holding is not None and self._holding.grad is None:
            raise RuntimeError(
                f"rank {self._rank}: zero_grad() inside of the loop dropped the gradients of this "
                "step's earlier passes, which add up; call step() and zero_grad() after the loop"
            )


@contextmanager
def gradients_zeroed(loss: Tensor) -> Iterator[None]:
    """Gradients that a backward of `loss` adds to parameters are exactly 0, also if it is NaN.

    A factor of 0 would not do: the mean over an empty set is NaN, and 0 * NaN is NaN. Functions
    written in Python get zeros too, because they may run a backward of their own, to parameters
    that are not in this graph: reentrant checkpointing does.
    """

    def zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    handles = [
        node.register_prehook(zeros)
        for node in nodes_from(loss.grad_fn)
        if leaf_of(node) is not None or isinstance(node, BackwardCFunction)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _backward_accumulates() -> bool:
    """Whether the running backward adds gradients to parameters. For a hook on a tensor.

    `autograd.grad` only returns them: a loss may need those of inputs, as a gradient penalty does.
    """
    nodes = nodes_from(torch._C._current_autograd_node())
    leaves = (node for node in nodes if isinstance(leaf_of(node), nn.Parameter))
    try:
        return any(map(torch._C._will_engine_execute_node, leaves))
    except RuntimeError:  # torch cannot tell of a leaf whose gradient `autograd.grad` returns
        return False


def _rounds(factor: float, dtype: torch.dtype) -> bool:
    """Whether a gradient of this dtype cannot hold the weight of a pass to fp32 precision."""
    rounded = float(torch.tensor(factor, dtype=dtype, device="cpu"))
    return not math.isclose(rounded, factor, rel_tol=1e-6)


def outside_of_the_loop(rank: int) -> str:
    """The message of a backward for which there is no pass."""
    return (
        f"rank {rank}: backward() is for the loop over passes, once for each micro-batch: for "
        "micro_batch in passes(batch): passes.backward(loss_fn(model, micro_batch))"
    )


_ROUNDED = (
    "the loss has 16 bits, so its gradient, which is the weight of the pass, is rounded (bf16: by "
    "up to 0.2 %); compute the loss in fp32, for example from logits.float()"
)

_STEP_INSIDE_LOOP = (
    "a step was started inside the loop of another step; end it first. After an exception in its "
    "body that you handle, use `with passes(batch) as micro_batches:`, which ends it"
)
