"""Captures the rows of factored layers in forward and backward.

Autograd sees the weight as a constant, so it computes the gradients of input and bias only. In the
backward of a call, its inputs and output gradients go to the layer's `FactoredRows`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poplar.zero.factors.rows import FactoredRows


class FactoredForward:
    """Takes the place of the `forward` of an `nn.Linear`."""

    def __init__(self, module: nn.Linear, rows: FactoredRows) -> None:
        self._module, self._rows = module, rows
        module.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the module its `forward` back."""
        if vars(self._module).get("forward") is self:
            del self._module.forward

    # In a compiled module it runs between graphs: it keeps tensors of the backward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(input, weight, bias)
        # Two dimensions: the output is then no view, which a function may not write in place.
        x_rows = input.reshape(-1, self._rows.inputs)
        y = F.linear(x_rows, weight.detach(), bias)
        y = _captured(y, x_rows.detach(), self._rows.token, self._rows)
        return y if input.dim() == 2 else y.view(*input.shape[:-1], self._rows.outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has the plain `forward`: it does not belong to the engine."""
        return _same, (MethodType(nn.Linear.forward, self._module),)


class _Capture(torch.autograd.Function):
    """The identity on `y`. Its backward captures the gradient of `y` with the saved `x`.

    `x` is a saved tensor, so autograd raises if it is changed in place before the backward, and
    activation checkpointing drops and recomputes it.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, token: Tensor, rows: FactoredRows) -> Tensor:
        ctx.mark_dirty(y)  # not a view: the user may change it in place, as in ReLU(inplace=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.rows = rows
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"second-order gradients (create_graph=True) through layer {ctx.rows.name!r}, "
                "whose weight gradient is sent as factors; leave it out of Plan.factored"
            )
        if dy is None:
            return None, None, None, None
        (x,) = ctx.saved_tensors
        ctx.rows.capture(x, dy)
        return dy, None, dy.new_zeros((), dtype=torch.float32), None


_captured: Callable[[Tensor, Tensor, Tensor, FactoredRows], Tensor] = _Capture.apply


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
