"""`TrainerOptimizer`: a `HeteroZeroOptimizer` as `Trainer` handles optimizers.

`Trainer` calls `step()` after `training_step`, which has run the whole step with `train_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from poplar.optimizer import HeteroZeroOptimizer
from poplar.zero.step_result import StepResult
from poplar.zero.update import OptimizerFactory


class TrainerOptimizer(torch.optim.Optimizer):
    """Has all attributes of its `owned` optimizer, and a `step()` that completes `train_step`.

    Args:
        params: param groups, as `Trainer.create_optimizer` forms them.
        owner: the model; not named `model`, which `Trainer` would take for the parameters.
        optimizer_class: the class of the update.
        options: further arguments of `HeteroZeroOptimizer`.
    """

    # Keeps `Accelerator.prepare` from wrapping it, which would load its state dict.
    _is_accelerate_prepared = True

    def __init__(
        self,
        params: Any,
        *,
        owner: nn.Module,
        optimizer_class: OptimizerFactory,
        options: Mapping[str, Any],
    ) -> None:
        # Not super().__init__(): everything of an optimizer is that of `owned`.
        groups = [group for group in params if group["params"]]
        self.owned = HeteroZeroOptimizer(owner, optimizer_class, params=groups, **options)
        self.result: StepResult | None = None
        self._completed = True
        self._skips_nonfinite = options.get("on_nonfinite") == "skip"
        self._may_skip = False

    def train_step(self, *args: Any, **kwargs: Any) -> StepResult:
        """One optimizer step; see `HeteroZeroOptimizer.train_step`. Collective."""
        self.result = self.owned.train_step(*args, **kwargs)
        scaler = kwargs.get("scaler") or self.owned._training_parts().scaler
        self._may_skip = self._skips_nonfinite or scaler is not None
        self._completed = False
        return self.result

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing: `train_step` has updated the parameters.

        Raises:
            RuntimeError: there was no `train_step` since the last call.
        """
        if self._completed:
            raise RuntimeError(
                "optimizer.step() without a training_step: PoplarTrainer.training_step runs the "
                "passes and the update of a step; call it once per step"
            )
        self._completed = True

    @property
    def step_was_skipped(self) -> bool:
        """The step was not applied, so the schedule does not advance; `Accelerator` asks for it.

        Without a loss scale and with `on_nonfinite="raise"`, such a step ends training, and nothing
        is read from the device.
        """
        return self._may_skip and self.result is not None and self.result.skipped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the owned optimizer; schedulers change them."""
        return self.owned.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the owned optimizer."""
        return self.owned.state

    def state_dict(self) -> dict[str, Any]:
        return self.owned.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owned.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.owned.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.owned.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "owned":  # not built yet
            raise AttributeError(name)
        return getattr(self.owned, name)

    def __repr__(self) -> str:
        return f"TrainerOptimizer({self.owned!r})"
