"""What the optimizer state of a parameter consists of, and how it is cut with the parameter.

State of elements has one entry per element. State of blocks also has one entry per block, or per
two elements. A whole parameter may have state of any shape. All of these are cut in proportion: a
cut at a part of the elements is at the same part of the entries. What does not grow with the
parameter (a step counter, a quantisation map) is not cut, and each part has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poplar.zero.flat_parameter import FlatParameter
from poplar.zero.optimizers.granularity import WHOLE


class StateValue(NamedTuple):
    """One value of the state of a parameter."""

    shape: torch.Size | None
    """Of the whole parameter's value, which is cut with the parameter; None: it is not cut."""
    example: Any
    """What it is at first; if it is cut, of any shape."""


StateLayout = Mapping[str, StateValue]
"""By name of a state value."""


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Plain tensors and other values by name; they share memory with the state.

    A tensor that consists of others, such as torchao's quantised ones, is replaced by them, and a
    mapping by its entries.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= taken_apart(value)
        elif is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            found |= taken_apart({f"{key}.{name}": getattr(value, name) for name in names})
        else:
            found[key] = value
    return found


def scaled(element: int, numel: int, shape: Sequence[int]) -> int:
    """The entry of a value of this shape that belongs to an element of a parameter of `numel`."""
    return element * math.prod(shape) // numel if numel else 0


class StateLayouts:
    """The layouts of the state of all parameters, found by steps of probes on a device.

    A probe returns, for a param group, a shape and a device, the state of zeros after one step.
    """

    def __init__(
        self,
        probe: Callable[[int, Sequence[int], torch.device], dict[str, Any]],
        device: torch.device,
    ) -> None:
        self._probe, self._device = probe, device
        self._found: dict[Any, StateLayout] = {}

    def of(self, flat: FlatParameter, position: int) -> StateLayout:
        """What the state of a parameter consists of."""
        group, step, shape = (
            flat.groups[position],
            flat.steps[position] if flat.separate[position] else None,
            flat.parameters[position].shape,
        )
        if (group, step, shape) not in self._found:
            self._found[group, step, shape] = self._layout(group, step, shape)
        return self._found[group, step, shape]

    def _layout(self, group: int, step: int | None, shape: torch.Size) -> StateLayout:
        if step == WHOLE:
            whole = taken_apart(self._probe(group, shape, self._device))
            return {
                key: StateValue(value.shape if _has_dimensions(value) else None, value)
                for key, value in whole.items()
            }
        # What has twice as many entries for twice as many elements is cut.
        first = 1 if step is None else step
        small, large = (taken_apart(self._probe(group, (first * n,), self._device)) for n in (1, 2))
        layout = {}
        for key, value in large.items():
            of_value = None
            if _has_dimensions(value) and value.numel() == 2 * small[key].numel():
                entries = scaled(shape.numel(), 2 * first, value.shape)
                of_value = shape if entries == shape.numel() else torch.Size([entries])
            layout[key] = StateValue(of_value, value)
        return layout

    def new_state(self, flat: FlatParameter, position: int, shape: Sequence[int]) -> dict[str, Any]:
        """The state of a part of a parameter, or of a run that begins with it, before any update.

        The part has this shape. The state is where the master is.
        """
        device = flat.master.device
        if flat.separate[position]:
            return self._probe(flat.groups[position], shape, device)
        return {
            key: torch.full(
                tuple(shape), value.example[0].item(), dtype=value.example.dtype, device=device
            )
            if value.shape is not None
            else copy_value(value.example)
            for key, value in self.of(flat, position).items()
        }


def fill_state(state: dict[str, Any], cut: Mapping[str, Tensor], others: Mapping[str, Any]) -> None:
    """Write values into a new state: by name of `taken_apart`, what is `cut`, in any shape.

    Of all `others`, parts of tensors that consist of others keep their value. Tensors stay on the
    device that the new state has them on.
    """
    for key, value in taken_apart(state).items():
        if key in cut:
            value.copy_(cut[key].view(value.shape))
    for key, value in others.items():
        if key in state:
            now = state[key]
            are_tensors = isinstance(now, Tensor) and isinstance(value, Tensor)
            state[key] = value.to(now.device, copy=True) if are_tensors else copy_value(value)


def copy_value(value: Any) -> Any:
    """A copy of a tensor, or any other value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
