"""`Elements`: a flat range of a parameter's values that a state dict holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Elements:
    """Elements `[start, start + len(values))` of a tensor, in row-major order."""

    values: Tensor
    """1-D."""
    start: int

    @classmethod
    def of(cls, value: object, shape: Sequence[int], name: str) -> Elements:
        """What a value of a state dict holds of a tensor of this shape.

        Args:
            value: the whole tensor, or a `ShardTensor` with a part of it.
            shape: the expected shape.
            name: of the value, for messages.

        Raises:
            TypeError: it is another kind of tensor, or none.
            ValueError: it has another shape.
        """
        from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor

        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, but should be a tensor")
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but here it has shape {tuple(shape)}; "
                "the state is of another model"
            )
        if isinstance(value, ShardTensor):
            return cls(value.local, value.start)
        if type(value) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{name} is a {type(value).__name__}; load it with torch.distributed.checkpoint, "
                "or make it a whole tensor first"
            )
        return cls(value.detach().reshape(-1), 0)

    @classmethod
    def none(cls) -> Elements:
        """No elements."""
        return cls(torch.empty(0, device="cpu"), 0)

    def part(self, start: int, stop: int, name: str) -> Tensor:
        """Elements `[start, stop)`, counted from the tensor's first.

        Raises:
            ValueError: some of them are not held.
        """
        end = self.start + self.values.numel()
        if start >= stop:
            return self.values[:0]
        if not self.start <= start <= stop <= end:
            raise ValueError(
                f"{name} holds elements [{self.start}, {end}), but this rank owns [{start}, "
                f"{stop}): it was saved by another rank or under another plan; load it with "
                "torch.distributed.checkpoint, or save full_state_dict()"
            )
        return self.values[start - self.start : stop - self.start]
