"""`TrainerOptimizer`: a `HeteroZeroOptimizer` as `Trainer` handles optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.optimizers.granularity import OptimizerFactory
from poplar.zero.steps.step_result import StepResult


class TrainerOptimizer(HeteroZeroOptimizer):
    """Takes the call of `step()` that `Trainer` makes after a `train_step` as its end.

    Args:
        params: param groups, as `Trainer.create_optimizer` forms them.
        owner: the model; not named `model`, which `Trainer` would take for the parameters.
        optimizer_class: the class of the update.
        engine: further arguments of `HeteroZeroOptimizer`.
        **options: of `optimizer_class`; trainers read the learning rate among them.
    """

    # Keeps `Accelerator.prepare` from wrapping it, which would load its state dict.
    _is_accelerate_prepared = True

    result: StepResult | None = None
    """Of the last step."""
    _is_in_step = False
    _completed = True
    _may_skip = False

    def __init__(
        self,
        params: Any,
        *,
        owner: nn.Module,
        optimizer_class: OptimizerFactory,
        engine: Mapping[str, Any],
        **options: Any,
    ) -> None:
        groups = [group for group in params if group["params"]]
        super().__init__(owner, optimizer_class, params=groups, **engine, **options)
        self._skips_nonfinite = engine.get("on_nonfinite") == "skip"

    def train_step(self, *args: Any, **kwargs: Any) -> StepResult:
        """As of the base class. Collective."""
        self._is_in_step = True
        try:
            result = super().train_step(*args, **kwargs)
        finally:
            self._is_in_step = False
        scaler = kwargs.get("scaler") or self._training.scaler
        self._may_skip = self._skips_nonfinite or scaler is not None
        self.result, self._completed = result, False
        return result

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does nothing after `train_step`, which has updated the parameters.

        Raises:
            RuntimeError: there was no `train_step` since the last call.
        """
        if self._is_in_step:
            return super().step(closure)
        if self._completed:
            raise RuntimeError(
                "optimizer.step() without a training_step: PoplarTrainer.training_step runs the "
                "passes and the update of a step; call it once per step"
            )
        self._completed = True
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch does not run the hooks around it

    @property
    def step_was_skipped(self) -> bool:
        """The step was not applied, so the schedule does not advance; `Accelerator` asks for it.

        Without a loss scale and with `on_nonfinite="raise"`, such a step ends training, and nothing
        is read from the device.
        """
        return self._may_skip and self.result is not None and self.result.skipped
