"""A step's forwards. The first may run while other ranks are still on their way into the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LossFunction = Callable[[nn.Module, Any], Tensor]


class MicroBatchLoss:
    """`loss_fn` on the micro-batches of one step."""

    def __init__(self, loss_fn: LossFunction, model: nn.Module, rank: int) -> None:
        self._loss_fn, self._model, self._rank = loss_fn, model, rank
        self._early: Tensor | Exception | None = None
        self.began: float | None = None
        """When the forward that has run ahead began, until its pass asks for its loss."""

    def compute_early(self, batch: Any) -> None:
        """Run the first forward now; its loss, or what it raised, waits for its pass."""
        self.began = time.perf_counter()
        try:
            self._early = self(batch)
        except Exception as caught:
            self._early = caught

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a micro-batch.

        Raises:
            TypeError: `loss_fn` returned no scalar tensor.
        """
        if self._early is not None:
            outcome, self._early, self.began = self._early, None, None
            if not isinstance(outcome, Exception):
                return outcome
            try:
                raise outcome
            finally:
                del outcome  # its frames, which hold activations, would hold it in a cycle
        value = self._loss_fn(self._model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"rank {self._rank}: loss_fn(model, micro_batch) must return a scalar tensor, got "
                f"{shape}; return the mean over the micro-batch"
            )
        return value
