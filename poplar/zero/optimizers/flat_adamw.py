"""AdamW on flat shards with Poplar's operator, which reads and writes each element once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from poplar import ops


class FlatAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` for 1-D fp32 tensors, with the same state and results.

    The operator also scales the gradient and writes the low-precision values; with torch's kernel
    each would be a separate pass over memory.
    """

    _incremented: tuple[Tensor, ...] = ()
    """Step counters that were incremented since `settle_step_count`."""

    def step_scaled(
        self,
        scale: Tensor | None,
        found_inf: Tensor | None,
        rounded: Mapping[Tensor, Tensor],
    ) -> None:
        """`step` with `scale` times the gradients, which are not changed.

        Args:
            scale: one fp32 on the gradients' device, for unscaling and clipping; None for 1.
            found_inf: one fp32 there. If it is not 0, nothing changes; call `settle_step_count`.
            rounded: by parameter, the low-precision tensor that gets its new values.
        """
        steps = [
            (values, group, self.state_of(values))
            for group in self.param_groups
            for values in group["params"]
            if values.grad is not None
        ]
        states = [state for _, _, state in steps]
        if not steps:
            return
        counters = [state["step"] for state in states]
        self._incremented += tuple(counters)
        torch._foreach_add_(counters, 1.0)
        counts = torch.stack(counters).tolist()
        if min(counts) < 1:
            raise ValueError(
                f"a step count of AdamW's state is {min(counts) - 1:g}, below 0: was the loaded "
                "state edited?"
            )
        ops.adamw_(
            [values for values, _, _ in steps],
            [values.grad for values, _, _ in steps],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [rounded.get(values) for values, _, _ in steps],
            [_rule(group, count) for (_, group, _), count in zip(steps, counts, strict=True)],
            scale=scale,
            found_inf=found_inf,
        )

    def settle_step_count(self, *, skipped: bool) -> None:
        """Decrement the step counters if the steps since the last call were skipped."""
        if skipped and self._incremented:
            torch._foreach_sub_(self._incremented, 1.0)
        self._incremented = ()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As `torch.optim.AdamW.step`."""
        if closure is not None or not self.uses_operator():
            for values, state in self.state.items():  # torch expects counters on the device
                if "step" in state:
                    state["step"] = state["step"].to(values.device)
            result: float | None = super().step(closure)
            return result
        self.step_scaled(None, None, {})
        self.settle_step_count(skipped=False)
        return None

    def uses_operator(self) -> bool:
        """Whether the operator supports the user's options."""
        return not any(
            group["amsgrad"]
            or group["capturable"]
            or group["differentiable"]
            or not group.get("decoupled_weight_decay", True)
            for group in self.param_groups
        )

    def state_of(self, values: Tensor) -> dict[str, Any]:
        """The state of `values`, allocated as their first step would."""
        state: dict[str, Any] = self.state[values]
        if not state:
            state.update(  # at once, so that no part is left if memory runs out
                step=torch.zeros((), dtype=torch.float32, device="cpu"),
                exp_avg=torch.zeros_like(values),
                exp_avg_sq=torch.zeros_like(values),
            )
        elif state["step"].is_cuda:  # from a checkpoint; reading it would synchronize
            state["step"] = state["step"].cpu()
        return state


def _rule(group: Mapping[str, Any], step: float) -> ops.AdamWRule:
    beta1, beta2 = group["betas"]
    return ops.AdamWRule(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        maximize=group["maximize"],
    )
