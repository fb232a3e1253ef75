"""Loss scaling for fp16, agreed by all ranks: either all of them step, or none does."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState


@runtime_checkable
class AgreedGradient(Protocol):
    """An optimizer whose gradient belongs to all ranks, as `HeteroZeroOptimizer`."""

    def multiply_gradient(self, factor: Tensor) -> Tensor:
        """Multiply the step's gradient by one element, without waiting for it.

        Returns one fp32 that all ranks agree on: 0, or 1 if the gradient is not finite, and then
        the optimizer's `step` changes nothing.
        """
        ...


class GradScaler(TorchGradScaler):
    """As `torch.amp.GradScaler`: pass it to `train_step`, or use it as one uses torch's.

    The gradients that it unscales and checks are the reduced ones, in fp32, sharded over the ranks;
    whether one of them is not finite is agreed by all. Unscaling costs no pass of its own: it is
    one factor that the optimizer step multiplies in. With Poplar's AdamW and torch's fused
    optimizers the host waits for nothing before the update; `step` always calls the optimizer's,
    which changes nothing where the gradient is not finite. `unscale_` and `step` are collective.
    For any other optimizer it does what torch's does.
    """

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
        if self._scale is None:
            # A rank without samples scales no loss, but steps with the others.
            self._lazy_init_scale_growth_tracker(optimizer.param_groups[0]["params"][0].device)
        assert self._scale is not None
        flag = optimizer.multiply_gradient(self._scale.double().reciprocal())
        state["found_inf_per_device"] = {flag.device: flag}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(...)`, unless the gradient of some rank is not finite. Collective."""
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
