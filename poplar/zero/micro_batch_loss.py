"""The losses of a step's micro-batches; the first may be computed before all ranks are ready."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from poplar.values.errors import CollectiveTimeout

LossFunction = Callable[[nn.Module, Any], Tensor]


class PassLoss(ABC):
    """The losses of the passes of one step."""

    @abstractmethod
    def __call__(self, batch: Any) -> Tensor:
        """The loss of a micro-batch."""

    def compute_early(self, batch: Any) -> None:
        """Run the first forward now, if it can run before all ranks are ready."""

    def abort(self, error: Exception) -> bool:
        """Report that a pass of this rank failed to ranks that wait for it inside of their loss.

        True: there may be any, and this rank cannot complete the pass with them.
        """
        return False

    def raise_any_error(self) -> None:
        """Raise what failed in a loss that this rank completed nevertheless, for the others.

        Call it after the backward.
        """


class MicroBatchLoss(PassLoss):
    """Runs `loss_fn` on the micro-batches of one step."""

    def __init__(self, loss_fn: LossFunction, model: nn.Module, rank: int) -> None:
        self._loss_fn, self._model, self._rank = loss_fn, model, rank
        self._early: Tensor | Exception | None = None

    def compute_early(self, batch: Any) -> None:
        """Run the first forward now and store its loss or exception for its pass."""
        try:
            self._early = self(batch)
        except CollectiveTimeout:
            raise
        except Exception as caught:
            self._early = caught

    def __call__(self, batch: Any) -> Tensor:
        if self._early is not None:
            outcome, self._early = self._early, None
            if not isinstance(outcome, Exception):
                return outcome
            try:
                raise outcome
            finally:
                del outcome  # break the reference cycle through its frames, which hold activations
        return check_scalar(self._loss_fn(self._model, batch), prefix=f"rank {self._rank}: ")


def check_scalar(value: Any, *, prefix: str = "") -> Tensor:
    """The loss if it is a tensor with one element; else TypeError, whose message has the prefix."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{prefix}loss_fn(model, micro_batch) must return a scalar tensor, got {shape}; return "
            "the mean over the micro-batch"
        )
    return value
