"""Parameters with their optimizers: Poplar's flat shard, and torch's list of parameters.

16-bit parameters have fp32 master copies, as in mixed-precision training. Both start from zeros and
take the first step of AdamW, so the first moment is proportional to the scaled gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poplar import ops

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
RULE = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
"""Keyword arguments of the optimizers."""


class Flat:
    """A flat shard and its state, updated by Poplar's operator.

    Args:
        gradient: fp32, read at every step.
        dtype: of the parameters; 16-bit ones are written besides the fp32 masters.
    """

    def __init__(self, gradient: Tensor, dtype: torch.dtype) -> None:
        self.gradient = gradient
        self.values, self.mean, self.square = (torch.zeros_like(gradient) for _ in range(3))
        self.rounded = None if dtype == torch.float32 else torch.zeros_like(gradient, dtype=dtype)

    def step(self, scale: Tensor, found_inf: Tensor | None = None) -> None:
        """A step on `scale` times the gradient."""
        state = ([self.values], [self.gradient], [self.mean], [self.square])
        rule = ops.AdamWRule(LR, *BETAS, EPS, WEIGHT_DECAY, step=1)
        ops.adamw_(*state, [self.rounded], [rule], scale=scale, found_inf=found_inf)

    def reset(self) -> None:
        """Restore the initial state."""
        for tensor in (self.values, self.mean, self.square, self.rounded):
            if tensor is not None:
                tensor.zero_()


class Listed:
    """Separate parameters, with an optimizer that takes a list of them.

    Args:
        grads: gradients after a backward; 16-bit ones are widened into the masters' `grad`.
        make: creates the optimizer of the (master) parameters, which are fp32.
    """

    def __init__(self, grads: Sequence[Tensor], make: MakeOptimizer) -> None:
        self._original = list(grads)
        self.parameters = [
            torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float32)) for g in grads
        ]
        self.grads = [g.to(torch.float32, copy=True) for g in grads]
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        self._values = [parameter.detach() for parameter in self.parameters]
        self.rounded = [torch.zeros_like(g) for g in grads if g.dtype != torch.float32]
        self.optimizer = make(self.parameters)
        self.optimizer.step()  # creates the state

    def receive(self) -> None:
        """Widen 16-bit gradients for the masters; fp32 gradients are used in place."""
        if self.rounded:
            torch._foreach_copy_(self.grads, self._original)

    def step(self) -> None:
        """A step on the current gradients; writes 16-bit parameters from their masters."""
        self.optimizer.step()
        if self.rounded:
            torch._foreach_copy_(self.rounded, self._values)

    def step_with_grad_scaler(self, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        """A step as `torch.amp.GradScaler.step` calls a fused optimizer, without a host
        synchronization.

        Args:
            grad_scale: divides the gradients, in place; None after `unscale_`.
            found_inf: one element; if it is not 0, the optimizer changes nothing.
        """
        self.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            self.step()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]

    def mean(self) -> Tensor:
        """All first moments, concatenated."""
        return torch.cat([self.optimizer.state[p]["exp_avg"].reshape(-1) for p in self.parameters])

    def reset(self) -> None:
        """Restore the initial state."""
        torch._foreach_zero_(self._values)
        torch._foreach_copy_(self.grads, self._original)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.zero_() if isinstance(value, Tensor) else 0
        for group in self.optimizer.param_groups:
            if "step" in group:  # apex counts steps there
                group["step"] = 0
