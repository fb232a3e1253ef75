"""Unequal micro-batches and numbers of passes in engines that average gradients over ranks.

The engine keeps parameters, gradients and optimizer. A pass is weighted by a factor of its loss, so
that the engine's mean over ranks is the gradient of the mean loss of the global batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from poplar.comm import Group, connect_control
from poplar.data import pytree
from poplar.errors import PoplarError
from poplar.plan import STRATEGIES, Plan
from poplar.zero import model_checks
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.micro_batch_loss import check_scalar
from poplar.zero.micro_batches import BatchSplitter, Loss, MicroBatch, Weight

_DOING = "a step"


class UnequalPasses:
    """Runs this rank's passes of a plan in a loop that the user owns. See the subclasses."""

    stages: tuple[int, ...]
    """Stages of the plans that the engine can run."""
    engine: str
    """The engine's name in messages."""
    continues_after_failure = True
    """Whether the engine can run another step after one that was left in a pass."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        allow_batch_norm: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self._called = model
        self._model: Any = getattr(model, "_orig_mod", model)  # as torch.compile returns it
        self._check_model()
        self._group = Group.of(self._process_group(), timeout)
        self._control = connect_control(self._group)
        self._agree_on_plan(plan)
        self._plan = plan
        every_pass = not self._may_differ_in_passes()
        self._splitter = BatchSplitter(plan, synchronizes_every_pass=every_pass)
        self._batch_norms = [] if allow_batch_norm else model_checks.batch_norms(self._model)
        self._open: MicroBatch | None = None
        self._parameters: list[nn.Parameter] = []
        self._holding: nn.Parameter | None = None
        """A parameter that has a gradient of earlier passes of this step."""
        self._in_backward = False
        self._has_run = False
        self._in_step = False
        self._has_agreed = False
        self._has_failed = False
        self._loss: Tensor | float = math.nan

    @property
    def plan(self) -> Plan:
        """The plan that is run."""
        return self._plan

    # What an engine defines.

    def _check_model(self) -> None:
        """Raise if the model is not one of the engine."""
        raise NotImplementedError

    def _process_group(self) -> dist.ProcessGroup:
        """The ranks over which the engine averages gradients."""
        raise NotImplementedError

    def _may_differ_in_passes(self) -> bool:
        """Whether ranks may have different numbers of passes under the plan."""
        raise NotImplementedError

    def _pass(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for the forward and the backward of one pass."""
        raise NotImplementedError

    # The loop.

    def __call__(
        self, batch: Any, *, weight: Weight | None = None, loss: Loss = "mean"
    ) -> Iterator[Any]:
        """Iterate over this rank's micro-batches of a global batch. Collective.

        Call `backward` once for each. A rank without samples in a pass gets one sample, whose
        gradient does not count: the engine needs a forward and a backward of every rank.

        Args:
            batch: this rank's part of the global batch, as `HeteroBatchSampler` gives it: any
                pytree of tensors, split along dim 0. A rank without samples passes one sample.
            weight: `weight(micro_batch)` -> its weight, such as `poplar.tokens()`; default: its
                number of samples.
            loss: what is given to `backward`: the "mean" over what `weight` counts, the "sum", or
                the sum already divided by the global total ("global_mean").

        Raises:
            RankFailed: another rank failed before its last backward.
            ValueError, TypeError, RuntimeError: this rank's batch is wrong, a loop body called
                `backward` of the loss itself, or not at all.
        """
        opened = self._splitter.open(
            self._control, batch, weight, loss, partial(self._check, batch)
        )
        micro_batches, _, _ = opened.wait(lambda: None)
        self._in_step, self._has_agreed, self._loss = True, False, 0.0
        self._parameters, self._holding = list(self._model.parameters()), None
        watch = self._called.register_forward_hook(self._watch_outputs)
        try:
            for micro_batch in micro_batches:
                self._open, self._has_run = micro_batch, False
                with self._pass(last=micro_batch.last):
                    yield micro_batch.batch if micro_batch.samples else one_sample(batch)
                    if self._open is not None:
                        raise RuntimeError(self._without_backward())
                    if not micro_batch.last:
                        self._check_gradients_are_kept()
        except GeneratorExit:  # a break, or an exception in the loop body
            if self._open is not None or not micro_batch.last:
                self._fail(PoplarError(_left_early(self._group.rank)))
            raise
        except Exception as error:
            self._fail(error)
            raise
        finally:
            watch.remove()
            self._open, self._in_step = None, False
            self._parameters, self._holding = [], None

    def backward(self, loss: Tensor) -> None:
        """Run the backward of this pass with its weight. Collective in the last pass of a step.

        Args:
            loss: the scalar loss of the micro-batch; for fp16, `scaler.scale(loss)`.

        Raises:
            RankFailed: another rank failed before its last backward, so no gradient was reduced.
            RuntimeError: not in the loop, called twice for one micro-batch, the loss is not of
                this model, or gradients of earlier passes were dropped.
        """
        micro_batch = self._open
        if micro_batch is None:
            raise RuntimeError(
                f"rank {self._group.rank}: backward() is for the loop over passes, once for each "
                "micro-batch: for micro_batch in passes(batch): "
                "passes.backward(loss_fn(model, micro_batch))"
            )
        if not self._has_run:
            raise RuntimeError(
                f"rank {self._group.rank}: the model that UnequalPasses was given has not run in "
                f"this pass, so {self.engine} would not reduce its gradients; compute the loss "
                "with that model, and give UnequalPasses the compiled one if you compile it"
            )
        check_scalar(loss, prefix=f"rank {self._group.rank}: ")
        self._check_gradients_are_kept()
        if micro_batch.last:
            self._agree()
        self._open = None
        self._in_backward = True
        try:
            self._run_backward(loss, micro_batch)
        finally:
            self._in_backward = False
        self._holding = next((p for p in self._parameters if p.grad is not None), None)

    def _run_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        if micro_batch.weight and micro_batch.samples:
            factor = micro_batch.weight * self._group.size  # the engine divides by the size
            (loss * factor).backward()
            self._loss = self._loss + loss.detach().double() * micro_batch.weight
        else:
            with gradients_zeroed(loss):
                loss.backward()

    def global_loss(self) -> Tensor:
        """The loss of the last global batch: a float64 scalar, equal on all ranks. Collective.

        It contains the loss scale if the losses were scaled.
        """
        device = next(self._model.parameters()).device
        value = torch.as_tensor(self._loss, dtype=torch.float64, device=device).reshape(())
        value = value.clone()
        dist.all_reduce(value, group=self._group.process_group)
        return value

    def _agree(self) -> None:
        """Check that no rank has failed before the collectives of the last backward. Collective."""
        self._has_agreed = True
        raise_on_any_error(self._control, None, doing=_DOING)

    def _fail(self, error: Exception) -> None:
        """Report an error of this rank to the ranks that wait in `_agree`, and drop gradients."""
        self._has_failed = True
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._has_agreed:
            return  # the other ranks are in their last backward, or have raised
        self._has_agreed = True
        with suppress(Exception):  # this rank raises the error itself
            raise_on_any_error(self._control, error, doing=_DOING)
        if isinstance(error, PoplarError):  # nothing is raised after a break
            warnings.warn(f"{error}, so the gradients of this step were dropped", stacklevel=3)

    def _watch_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook: a backward that has no weight fails before the engine communicates."""
        self._has_run = True

        def check(gradient: Tensor) -> None:
            if not self._in_step or self._in_backward:
                return
            if self._open is not None:
                raise RuntimeError(self._without_backward())
            raise RuntimeError(
                f"rank {self._group.rank}: a second backward in the loop body, whose gradient has "
                "no weight; add the losses and call passes.backward(loss) once for each micro-batch"
            )

        for tensor in pytree.tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(check)

    def _without_backward(self) -> str:
        return (
            f"rank {self._group.rank}: the loop body did not call passes.backward(loss), which "
            "gives the gradient of this pass its weight; call it instead of loss.backward(), once "
            "for each micro-batch"
        )

    # Checks.

    def _check_gradients_are_kept(self) -> None:
        """Raise if the loop body has dropped the gradients of the passes before."""
        if self._holding is not None and self._holding.grad is None:
            raise RuntimeError(
                f"rank {self._group.rank}: zero_grad() inside of the loop dropped the gradients of "
                "this step's earlier passes, which add up; call step() and zero_grad() after the "
                "loop"
            )

    def _check(self, batch: Any) -> None:
        if self._in_step:
            raise RuntimeError("a step was started inside the loop of another step; end it first")
        if self._has_failed and not self.continues_after_failure:
            raise RuntimeError(
                f"an earlier step was left in the middle of a pass, and {self.engine} holds parts "
                "of its gradient; build the model again and load a checkpoint"
            )
        model_checks.reject_batch_norm(self._batch_norms)
        if batch is None:
            raise ValueError(
                "got no batch; a rank without samples in the plan passes one sample, as "
                f"HeteroBatchSampler gives it, because {self.engine} needs a pass of every rank"
            )

    def _agree_on_plan(self, plan: Plan) -> None:
        """Check the plan on all ranks and that it is the same. Collective."""
        error: Exception | None = None
        try:
            self._check_plan(plan)
        except Exception as caught:
            error = caught
        raise_on_any_error(self._control, error, doing="building UnequalPasses")
        digests = self._control.exchange_objects(plan.digest(), what="comparing plans")
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ValueError(
                f"rank(s) {others} have another plan than rank 0; make it once and give it to all "
                "ranks, for example with autotune or Plan.from_json"
            )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a poplar.Plan, got {type(plan).__name__}")
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
        if plan.units or not (even or plan.stage == 0):
            raise ValueError(
                f"{self.engine} has even shares and no persistent or recomputed units, so it "
                "cannot run this plan; plan with "
                f"poplar.integrations.{self.engine.lower()}.autotune"
            )


def _left_early(rank: int) -> str:
    return f"rank {rank} left the loop over its passes before its end"


def one_sample(batch: Any) -> Any:
    """The first sample of a batch."""
    return pytree.split(batch, [1, pytree.samples_in(batch) - 1])[0]


@contextmanager
def gradients_zeroed(loss: Tensor) -> Iterator[None]:
    """Gradients that a backward of `loss` adds to parameters are exactly 0, also if it is NaN.

    A factor of 0 would not do: the mean over an empty set is NaN, and 0 * NaN is NaN. Functions
    written in Python get zeros too, because they may run a backward of their own, to parameters
    that are not in this graph: reentrant checkpointing does.
    """

    def zeros(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    handles = [node.register_prehook(zeros) for node in _reaching_parameters(loss)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reaching_parameters(loss: Tensor) -> list[Any]:
    """The nodes of the autograd graph that add gradients to parameters, or may do so inside."""
    found, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") or isinstance(node, BackwardCFunction):
            found.append(node)
        stack += [following for following, _ in node.next_functions]
    return found
