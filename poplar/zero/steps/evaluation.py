"""Exact evaluation over ranks with different numbers of batches.

With sharded parameters, all ranks run the same number of passes, and a rank without a batch only
takes part in the collectives. Otherwise each rank evaluates its batches alone, and the ranks now
and then tell each other that they still do, so that none waits until the deadline. The sums are
then exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from poplar.comm import Control
from poplar.data import pytree
from poplar.data.drawn_batches import drawn_by
from poplar.values.errors import CollectiveTimeout, agreed
from poplar.zero.agreement import caught, leader_of, raise_on_any_error
from poplar.zero.engine import Engine
from poplar.zero.micro_batch_loss import check_scalar
from poplar.zero.micro_batches import BatchSplitter, Weight, counted
from poplar.zero.passes.collective_pass import Mode
from poplar.zero.preserved_state import set_evaluation_mode
from poplar.zero.trained_buffers import take_trained_buffers

_ROUNDS = 8
"""Rounds in the time of a deadline; a batch may delay the end of one."""


class Evaluation:
    """One call of `evaluate`: this rank's sums and its first error."""

    def __init__(
        self,
        engine: Engine,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        weight: Weight | None,
        splitter: BatchSplitter,
    ) -> None:
        self._engine = engine
        self._control: Control = engine.control
        self._loss_fn = loss_fn
        self._weight = weight
        self._splitter = splitter
        self._total = self._count = torch.zeros((), dtype=torch.float64, device="cpu")
        self._is_wrong = torch.zeros((), dtype=torch.bool, device="cpu")
        """Whether a weight was negative or not finite."""
        self._error: Exception | None = None

    def run(self, loader: Iterable[Any]) -> float:
        """The mean over all ranks' batches. Collective."""
        busy = None
        if self._engine.scheduler.active:
            busy = RuntimeError("evaluate() inside a pass; call it between two steps")
        elif self._engine.values.has_unsharded and not self._engine.values.are_readable:
            busy = RuntimeError("evaluate() inside full_parameters(modules=...); leave it first")
        raise_on_any_error(self._control, busy, doing="evaluate()")
        modes = [(module, module.training) for module in self._engine.model.modules()]
        self._do(partial(set_evaluation_mode, self._engine.model))
        try:
            take_trained_buffers(self._engine, doing="evaluate()")
            self._run_rounds(loader)
        finally:
            self._do(partial(_restore, modes))
        raise_on_any_error(self._control, self._error, doing="evaluate()")
        sums = torch.stack([each.cpu() for each in (self._total, self._count, self._is_wrong)])
        by_rank = self._control.exchange(sums, what="the result of evaluate()")()
        total, count, wrong = torch.stack(by_rank).sum(0).tolist()
        if wrong:
            raise agreed(
                ValueError(
                    "evaluate(): weight= returned a number that is negative or not finite, but a "
                    "weight is the number of samples or tokens that count"
                )
            )
        if count == 0:
            why = "evaluate(): the loaders of all ranks yielded no samples (total weight 0)"
            raise agreed(ValueError(why))
        return float(total / count)

    def _run_rounds(self, loader: Iterable[Any]) -> None:
        """Evaluate all batches; a round is what ranks do between two exchanges."""
        sharded = not self._engine.values.are_readable
        seconds = 0.0 if sharded else self._control.group.timeout.total_seconds() / _ROUNDS
        batches, ends = self._started(loader), time.monotonic() + seconds
        while True:
            batch = self._next(batches)
            if batch is None or time.monotonic() >= ends:
                found = torch.tensor([batch is not None], device="cpu")
                flags = self._control.exchange(found, what="a round of evaluate()")()
                leader = leader_of([int(flag) for flag in flags])
                if leader is None:
                    return
                ends = time.monotonic() + seconds
            if sharded:
                self._engine.begin_pass(weight=0.0, leader=leader, last=True, mode=Mode.EVALUATE)
            if batch is not None:
                self._evaluate(*batch)
            if sharded:
                failed = self._error is not None
                self._do(partial(self._engine.end_pass, failed=failed))

    def _do(self, work: Callable[[], object]) -> None:
        """Do work that is due on every rank, also after an error, and keep the first error."""
        error = caught(work)
        self._error = self._error or error

    def _started(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """What is evaluated in one pass, and its weight; starting the loader may also fail."""
        drawn = drawn_by(loader)
        if drawn is None or drawn.has_samples:
            for batch in loader:
                yield from self._passes(batch)
        else:
            for _ in drawn:  # so that the next iteration is the next epoch here, too
                pass

    def _passes(self, batch: Any) -> Iterator[tuple[Any, Any]]:
        """A batch, or the micro-batches of one that splits itself, as in training."""
        count = self._weight
        if not isinstance(batch, pytree.SplitsItself):
            yield batch, pytree.samples_in(batch) if count is None else counted(count, batch)
            return
        sizes = self._splitter.evaluated_sizes(self._control.group.rank, len(batch))
        for part, size in zip(pytree.split(batch, sizes), sizes, strict=True):
            yield part, size if count is None else counted(count, part)

    def _next(self, batches: Iterator[tuple[Any, Any]]) -> tuple[Any, Any] | None:
        """The next batch with its weight; None at the end and after an error."""
        if self._error is not None:
            return None
        try:
            return next(batches)
        except StopIteration:
            return None
        except Exception as error:
            self._error = error
            return None

    def _evaluate(self, batch: Any, weight: Any) -> None:
        try:
            counts = _scalar(weight)
            loss = _scalar(self._loss_fn(self._engine.model, batch))
            counts = counts.to(loss.device, non_blocking=True)  # a number of samples is on the host
            # A mean of nothing is NaN, and counts nothing.
            self._total = self._total + torch.where(counts == 0, 0.0, loss * counts)
            self._count = self._count + counts
            self._is_wrong = self._is_wrong | ~((counts >= 0) & counts.isfinite())
        except CollectiveTimeout:
            raise
        except Exception as error:
            self._error = _explained(error)


def _explained(error: Exception) -> Exception:
    """An error of a loss function, with its cause if that is how it is called."""
    if "does not require grad" not in str(error):
        return error
    explained = RuntimeError(
        "evaluate() calls loss_fn without gradients. A loss that needs some (forces, the residual "
        "of a differential equation) computes them in `with torch.enable_grad():`, with respect to "
        f"inputs that require gradients: {error}"
    )
    explained.__cause__ = error
    return explained


def _scalar(value: Any) -> Tensor:
    """A number in float64. The host does not wait for one on a device."""
    if isinstance(value, SupportsFloat) and not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    return check_scalar(value).detach().double().reshape(())


def _restore(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Give every module the mode it had. A module may do more in `train` than set its flag."""
    for module, training in modes:
        if module.training is not training:
            module.train(training)
    for module, training in modes:  # a module may be part of several
        module.training = training
