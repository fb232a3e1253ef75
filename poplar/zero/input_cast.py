"""Casts the floating-point inputs of a model to the dtype in which its parameters compute.

[Note: input casts]
The cast happens where the loss function calls the model, so the loss function itself sees its batch
unchanged: targets and weights stay exact. Only the outermost call is cast. What the model passes to
its own modules (rotary tables, router logits) keeps the dtype that the model has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poplar.data import pytree


def cast_inputs(
    model: nn.Module, dtype: torch.dtype | None, unit_names: Sequence[str] = ()
) -> list[RemovableHandle]:
    """Cast the inputs of `model`, and of its modules where they are called from outside it.

    Modules without parameters (a loss, a noise schedule) and modules inside a unit, which must not
    be called directly, are not cast. Remove the hooks that this returns when the parameters no
    longer have this dtype; None and fp32 register nothing.
    """
    if dtype is None or dtype is torch.float32:
        return []
    cast = InputCast(dtype)
    handles = [
        model.register_forward_pre_hook(cast.enter_model, prepend=True, with_kwargs=True),
        model.register_forward_hook(cast.leave, always_call=True),
    ]
    for module, is_outside_units in _callable_modules(model, unit_names):
        if is_outside_units and next(module.children(), None) is not None:
            handles += [
                module.register_forward_pre_hook(cast.enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(cast.leave, always_call=True),
            ]
        else:
            hook = cast.enter_last
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    return handles


@contextmanager
def inputs_cast(
    model: nn.Module, dtype: torch.dtype | None, unit_names: Sequence[str]
) -> Iterator[None]:
    """A context in which inputs are cast; see `cast_inputs`."""
    handles = cast_inputs(model, dtype, unit_names)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class InputCast:
    """The hooks of one model. A copy of the model, whose dtype may change, is not cast.

    `torch.compile` can trace the hooks. Inside the outermost module they change nothing, so that
    all units share one graph.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        """`dtype`: None for hooks that do nothing."""
        self._dtype = dtype
        self._outermost: int | None = None
        """`id` of the module in whose forward we are (a reference would break `torch.compile`)."""
        self._depth = 0
        """Number of its forwards that have not returned; above 1 if it calls itself."""
        self._called_directly: set[int] = set()
        """`id` of each module called from outside the model. Checkpointing calls them again in the
        backward, where inner modules are called from outside too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return InputCast, (None,)

    def enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook of the model, which is never an inner module."""
        if self._called_directly:
            self._called_directly.clear()
        if self._outermost != id(module):
            self._outermost, self._depth = id(module), 0
        self._depth += 1
        return self._cast_all(args, kwargs)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook of a module that contains others with hooks."""
        if self._outermost is None:
            self._outermost, self._depth = id(module), 1
            return self._cast_direct_call(module, args, kwargs)
        if self._outermost == id(module):
            self._depth += 1
        return None

    def enter_last(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Forward pre-hook of a module without hooks inside."""
        if self._outermost is None:
            return self._cast_direct_call(module, args, kwargs)
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the modules that contain others with hooks."""
        if self._outermost == id(module):
            self._depth -= 1
            if self._depth == 0:
                self._outermost = None

    def _cast_direct_call(
        self, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if not _in_backward():
            self._called_directly.add(id(module))
        elif id(module) not in self._called_directly:
            return None
        return self._cast_all(args, kwargs)

    def _cast_all(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._dtype is None:
            return None
        args = tuple(self._cast(value) for value in args)
        return args, {name: self._cast(value) for name, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if self._changes(value) else value
        # A container without such tensors is passed on itself: the model may write to it.
        if any(self._changes(tensor) for tensor in pytree.tensors(value)):
            return pytree.map_tensors(self._cast, value)
        return value

    def _changes(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != self._dtype


def _callable_modules(
    model: nn.Module, unit_names: Sequence[str]
) -> Iterator[tuple[nn.Module, bool]]:
    """Modules with parameters, outside units or units themselves; whether they are outside."""
    inside = tuple(f"{name}." for name in unit_names)
    for name, module in model.named_modules():
        has_parameters = any(p.is_floating_point() for p in module.parameters())
        if name and has_parameters and not name.startswith(inside):
            yield module, name not in unit_names


def _runs_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_in_backward: Callable[[], bool] = torch.compiler.assume_constant_result(_runs_in_backward)
"""Whether autograd is calling. Constant in a graph; the graph of a unit that is called from inside
the model does not ask."""
