"""AdamW on flat shards by Poplar's own operator: one read and one write of everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poplar import ops

_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


class FlatAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` for 1-D fp32 tensors: its state, its results.

    The gradient's factor and the low-precision copy of the values are part of the same pass, where
    torch's own would need one more each.
    """

    _incremented: Sequence[Tensor] = ()
    """Step counters of the last step, which may turn out to have been none."""

    def step_scaled(
        self,
        scale: Tensor | None,
        found_inf: Tensor | None,
        rounded: Mapping[Tensor, Tensor],
    ) -> None:
        """`step` with `scale` times the gradients, which stay as they are.

        Args:
            scale: one fp32 where the gradients are, for unscaling and clipping; None for 1.
            found_inf: another one; if it is not 0 nothing changes, and `take_back` has to follow.
            rounded: by parameter, what takes its new values.
        """
        counted = []
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for values in group["params"]:
                if values.grad is None:
                    continue
                state = self._state_of(values)
                if state["step"].is_cuda:  # a checkpoint's; nobody should wait for a GPU
                    state["step"] = state["step"].cpu()
                state["step"] += 1
                counted.append(state["step"])
                ops.adamw_(
                    values,
                    values.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    rounded.get(values),
                    lr=float(group["lr"]),
                    beta1=float(beta1),
                    beta2=float(beta2),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=state["step"].item(),
                    maximize=group["maximize"],
                    scale=scale,
                    found_inf=found_inf,
                )
        self._incremented = counted

    def adopt_replaced_data(self) -> None:
        """The last step has found something that is not finite: it counts for nothing."""
        for count in self._incremented:
            count.sub_(1)
        self._incremented = ()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As `torch.optim.AdamW.step`."""
        if closure is not None or not self.uses_operator():
            for values, state in self.state.items():  # torch's own counts where the values are
                if "step" in state:
                    state["step"] = state["step"].to(values.device)
            result: float | None = super().step(closure)
            return result
        self.step_scaled(None, None, {})
        return None

    def uses_operator(self) -> bool:
        """Whether all that the user asks for is in the operator."""
        return not any(
            group["amsgrad"]
            or group["capturable"]
            or group["differentiable"]
            or not group.get("decoupled_weight_decay", True)
            for group in self.param_groups
        )

    def _state_of(self, values: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[values]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(values)
            state["exp_avg_sq"] = torch.zeros_like(values)
        return state


def can_round_to(dtype: torch.dtype) -> bool:
    """Whether the operator writes low-precision values of this dtype."""
    return dtype in _ROUNDED


def flat_class(
    factory: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., torch.optim.Optimizer]:
    """The class that steps flat shards of a device as the user's does, and fastest.

    The same on all ranks, whoever serves the operators: replicas must not drift apart.
    """
    if factory is torch.optim.AdamW and options.get("fused") and device.type in ("cpu", "cuda"):
        return FlatAdamW
    return factory
