"""A step of Lightning's loop: its time, and what it logs, up to a `StepResult`."""

from __future__ import annotations

import torch
from torch import Tensor

from poplar.integrations.lightning.logged_values import PassLog
from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.steps.step_result import StepResult, Stopwatch


class RunningStep:
    """Measures one step. Made before its first pass.

    Args:
        optimizer: of the step.
        log: what its passes log.
    """

    def __init__(self, optimizer: HeteroZeroOptimizer, log: PassLog) -> None:
        self._parts = optimizer._training_parts()
        self._log = log
        self._stopwatch = Stopwatch(
            self._parts.engine.strategy.streams, self._parts.engine.control.group
        )

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of the current pass, so that one that is not finite is found."""
        self._log.add_loss(loss)
        self._parts.engine.step.add_loss(loss)

    def passes_done(self) -> None:
        """Called after the last pass, before the update, which drops the state of the step."""
        engine = self._parts.engine
        self._state, self._waiting = engine.step, engine.strategy.waiting.step

    def finish(self, device: torch.device) -> tuple[Tensor, StepResult]:
        """Log the values of the step; returns the loss of the global batch. Collective."""
        self._stopwatch.stop()
        loss = self._log.finish(self._parts.engine.control, device)
        state, waiting = self._state, self._waiting
        result = StepResult(
            samples=state.samples,
            waiting_on=None,
            skipped=state.skipped if isinstance(state.skipped, bool) else state.skipped.read,
            losses=loss.reshape(1),
            norm=None,
            stopwatch=self._stopwatch,
            waiting_seconds=lambda: state.waited_to_open + waiting.seconds(),
        )
        return loss, result
