"""Loss scaling for fp16: either all ranks apply a step, or none does."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState


@runtime_checkable
class AgreedGradient(Protocol):
    """An optimizer whose gradient is shared by all ranks, such as `HeteroZeroOptimizer`."""

    def _multiply_gradient(self, factor: Tensor) -> Tensor:
        """Multiply the step's gradient by a one-element tensor, without a synchronization.

        Returns one fp32 that is equal on all ranks: 1 if the gradient is not finite, else 0. If it
        is 1, the optimizer's `step` changes nothing.
        """
        ...


class GradScaler(TorchGradScaler):
    """Like `torch.amp.GradScaler`: pass it to `train_step`, or call it in your own loop.

    It checks the reduced fp32 gradients of all ranks. Unscaling is a scale factor in the optimizer
    step, so gradients are read once. With Poplar's AdamW and torch's fused optimizers the host does
    not synchronize before the update. `step` always calls `optimizer.step`, which changes nothing
    if a gradient is not finite. `unscale_` and `step` are collective.
    With any other optimizer it is torch's scaler.
    """

    def make_scale(self, device: torch.device) -> Tensor | None:
        """The loss scale, as a tensor on the device; None if scaling is disabled.

        A rank without samples has scaled no loss, so it makes the scale here.
        """
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradient by the scale, once between two `update` calls. Collective."""
        if not isinstance(optimizer, AgreedGradient):
            super().unscale_(optimizer)
            return
        if not self._enabled:
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()"
            )
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        scale = self.make_scale(next(parameters).device)  # the first group may be empty
        assert scale is not None
        flag = optimizer._multiply_gradient(scale.double().reciprocal())
        state["found_inf_per_device"] = {flag.device: flag}
        state["stage"] = OptState.UNSCALED

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget that the gradient was unscaled: its step has failed, and another one comes."""
        self._per_optimizer_states.pop(id(optimizer), None)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step`, which changes nothing if a gradient is not finite. Collective."""
        if not isinstance(optimizer, AgreedGradient) or not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result: float | None = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result
