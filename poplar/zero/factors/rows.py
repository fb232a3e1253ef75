"""The rows of one factored layer: what its calls have captured, until they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poplar.comm import Control

Factors = tuple[Tensor, Tensor]
"""Inputs `x` and output gradients `dy` of the same rows: `[rows, inputs]` and `[rows, outputs]`."""


class FactoredRows:
    """Stands for the gradient of a weight `[outputs, inputs]`: the sum of `dy[i]` times `x[i]`.

    The rows of a pass are captured by the backward, weighted when the pass reduces or accumulates,
    and sent by the last pass of a step, or by each pass.
    """

    def __init__(
        self, name: str, outputs: int, inputs: int, device: torch.device, control: Control
    ) -> None:
        """`name`: of the module, for errors."""
        self.name, self.outputs, self.inputs = name, outputs, inputs
        self.token = torch.zeros((), device=device, requires_grad=True)
        """An input of every call of the layer: autograd accumulates its gradient when the backward
        has passed all of them, as it would with the gradient of the weight."""
        self.control = control
        """Exchanges the numbers of rows."""
        self._captured: list[Factors] = []
        self._weighted: list[Factors] = []

    def capture(self, x: Tensor, dy: Tensor) -> None:
        """Keep the rows of one call of the layer. `x` is copied, because it may change later."""
        self._captured.append((x.to(dy.dtype, copy=True), dy))

    def weigh(self, weight: float, x_dtype: torch.dtype, dy_dtype: torch.dtype) -> bool:
        """Multiply the captured rows by the weight of their pass, in fp32, and round them once.

        With weight 0 they are dropped, so NaN has no effect.

        Returns:
            Whether there were any.
        """
        captured, self._captured = self._captured, []
        if weight != 0.0:
            for x, dy in captured:
                self._weighted.append((x.to(x_dtype), (dy.float() * weight).to(dy_dtype)))
        return bool(captured)

    def take(self) -> list[Factors]:
        """The weighted rows, which are no longer held here."""
        taken, self._weighted = self._weighted, []
        return taken

    def drop_captured(self) -> None:
        """Drop the rows of the open pass."""
        self._captured.clear()

    def drop_weighted(self) -> None:
        """Drop the rows of earlier passes, whose step was abandoned."""
        self._weighted.clear()

    def tensors(self) -> Sequence[Tensor]:
        """All rows that are held."""
        return [part for rows in (*self._captured, *self._weighted) for part in rows]
