"""Captures the rows of a factored layer in forward and backward.

Autograd sees the weight as a constant, so it computes the gradients of input and bias only. In the
backward of a call, its inputs and output gradients are captured, if that backward would accumulate
the gradient of the weight: `autograd.grad` with respect to an input accumulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poplar.zero.model_hook import plain_forward

Rows = tuple[Tensor, Tensor]
"""Inputs `x` and output gradients `dy` of the same rows: `[rows, inputs]` and `[rows, outputs]`."""


class CapturingForward:
    """Takes the place of the `forward` of an `nn.Linear` from `install` to `remove`."""

    def __init__(self, module: nn.Linear, name: str) -> None:
        """`name`: of the weight, for errors."""
        self.module, self.name = module, name
        self._weight = module.weight
        self.token = torch.zeros((), device=module.weight.device, requires_grad=True)
        """An input of every call of the layer: autograd accumulates its gradient when the backward
        has passed all of them, as it would with the gradient of the weight."""
        self.captured: list[Rows] = []
        """The rows of each call since it was cleared."""

    def install(self) -> None:
        """Replace the `forward` of the module."""
        self.module.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the module its `forward` back."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def capture(self, x: Tensor, dy: Tensor) -> None:
        """Keep the rows of one call of the layer. `x` is copied, because it may change later."""
        self.captured.append((x.to(dy.dtype, copy=True), dy))

    # In a compiled module it runs between graphs: it keeps tensors of the backward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if not torch.is_grad_enabled() or not self._captures(weight):
            return F.linear(input, weight, bias)
        outputs, inputs = weight.shape
        # Two dimensions: the output is then no view, which a function may not write in place.
        x_rows = input.reshape(-1, inputs)
        y = F.linear(x_rows, weight.detach(), bias)
        y = _captured(y, x_rows.detach(), self.token, weight, self)
        return y if input.dim() == 2 else y.view(*input.shape[:-1], outputs)

    def _captures(self, weight: Tensor) -> bool:
        """Whether the gradient of the layer's parameter is the product of the rows of this call.

        It is not if `functional_call` or a parametrization has put another tensor in the place of
        the parameter, in a transform of `torch.func`, or if the user has registered a hook that may
        change the gradient. Autograd then computes what it is; if anything of it reaches the
        parameter, `FactoredParameter.check_gradients` raises.
        """
        return (
            weight is self._weight
            and weight.requires_grad
            and not self.has_hooks
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    @property
    def has_hooks(self) -> bool:
        """Whether the user has registered hooks on the gradient of the layer's weight."""
        return bool(self._weight._backward_hooks)

    def would_accumulate(self, accumulator: Any) -> bool:
        """Whether the running backward would accumulate the gradient of the weight.

        Args:
            accumulator: the node of the graph that accumulates gradients of the weight.
        """
        try:
            return torch._C._will_engine_execute_node(accumulator)
        except RuntimeError as error:  # torch cannot tell if the weight is an input of the call
            raise RuntimeError(
                f"autograd.grad with respect to {self.name!r}, whose gradient is sent as factors "
                "and never computed as a whole; leave its layer out of Plan.factored (autotune and "
                "search: factored='never')"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has the plain `forward`: it does not belong to the engine."""
        return plain_forward, (MethodType(nn.Linear.forward, self.module),)


class _Capture(torch.autograd.Function):
    """The identity on `y`. Its backward captures the gradient of `y` with the saved `x`.

    `x` is a saved tensor, so autograd raises if it is changed in place before the backward, and
    activation checkpointing drops and recomputes it. `weight` is an input without a gradient: its
    place in the graph shows which calls of autograd would accumulate one.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, token: Tensor, weight: Tensor, layer: CapturingForward
    ) -> Tensor:
        ctx.mark_dirty(y)  # not a view: the user may change it in place, as in ReLU(inplace=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"second-order gradients (create_graph=True) through the layer of "
                f"{ctx.layer.name!r}, whose gradient is sent as factors; leave the layer out of "
                "Plan.factored"
            )
        if dy is None:
            return None, None, None, None, None
        *_, (accumulator, _) = ctx.next_functions
        if not ctx.layer.would_accumulate(accumulator):
            return dy, None, None, None, None
        if ctx.layer.has_hooks:
            raise RuntimeError(
                f"a hook was registered on {ctx.layer.name!r} after the forward of its layer, but "
                "its gradient is sent as factors and never computed as a whole; leave the layer "
                "out of Plan.factored (autotune and search: factored='never')"
            )
        (x,) = ctx.saved_tensors
        ctx.layer.capture(x, dy)
        return dy, None, dy.new_zeros((), dtype=torch.float32), None, None


_captured: Callable[[Tensor, Tensor, Tensor, Tensor, CapturingForward], Tensor] = _Capture.apply
