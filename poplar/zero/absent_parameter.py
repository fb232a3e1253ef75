"""What a parameter is while its values are not on this rank: it reads as NaN and rejects writes.

Reading freed memory could crash the process; NaN is safe and visible. A write would be lost, and a
loss that uses the values would be NaN, so both raise. The class of the parameter object changes
meanwhile, because torch asks the class of an argument before it runs an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

direct_access = torch._C.DisableTorchFunctionSubclass
"""A context that reads and sets attributes such as `.grad` without the checks below, which cost
microseconds each; for loops over many parameters."""


def absent_data(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, or 0 in integers, of this shape in the memory of one element."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class AbsentValues(Tensor):
    """A tensor that stands for values that are not here, or a view of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with direct_access():
            name = func.__name__.partition(".")[0]  # an operator may have ".overload"
            written = next(_written(name, args, kwargs), None)
            if written is not None:
                verb = "shares the memory of" if name in _SHARES_MEMORY else "writes to"
                raise RuntimeError(_message(written, f"{name} {verb}"))
            result = func(*args, **kwargs)
            if not _is_recorded(result):
                return _with_marked_views(name, result, list(_absent(args)))
            if func not in _DERIVE_NOTHING:
                read = next(_absent(args), None)
                if read is not None and read.requires_grad:
                    raise RuntimeError(_message(read, f"{name} computes a loss with"))
            return result

    def __deepcopy__(self, _memo: Any) -> Any:
        raise RuntimeError(_COPIED)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise RuntimeError(_COPIED)


def classes_of(parameter: nn.Parameter) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """The class of a parameter while its values are on this rank, and while they are absent."""
    cls = type(parameter)
    present = cls.__bases__[1] if issubclass(cls, AbsentValues) else cls
    return present, _absent_class(present)


def mark_present(parameter: nn.Parameter) -> None:
    """Accept writes to a parameter whose values are on this rank again."""
    if issubclass(type(parameter), AbsentValues):
        parameter.__class__ = classes_of(parameter)[0]


@functools.cache
def _absent_class(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(cls.__name__, (AbsentValues, cls), {})


_DERIVE_NOTHING = {
    *(getattr(Tensor, name).__get__ for name in ("grad", "T")),
    *(getattr(Tensor, name) for name in ("__getitem__", "expand_as", "flatten", "narrow")),
    *(getattr(Tensor, name) for name in ("permute", "reshape", "select", "squeeze", "t")),
    *(getattr(Tensor, name) for name in ("transpose", "unsqueeze", "view", "view_as")),
    torch.autograd.backward,
    torch.autograd.grad,
}
"""Their results may be part of a graph, but do not depend on values: `expand_as` and `view_as` are
how tools find the node that accumulates a gradient."""

_VIEWS_IF_CONTIGUOUS = {"contiguous", "ravel"}
"""Their results are views of a parameter, but copies of a placeholder."""

_ASSIGNMENTS = {f"__i{name}__" for name in ("add", "and", "floordiv", "lshift", "mod", "mul")} | {
    *(f"__i{name}__" for name in ("or", "pow", "rshift", "sub", "truediv", "xor")),
    "__setitem__",
}
_SHARES_MEMORY = {"numpy", "__array__", "__dlpack__"}
"""Other libraries could write to their results without a check."""
_WRITES_NO_VALUE = {"detach_", "requires_grad_", "rename_", "share_memory_"}


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The absent tensors to which a function writes."""
    if name == "copy_" and args[0] is args[1]:
        return  # `load_state_dict` does, after the engine has loaded what this rank stores
    is_method = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NO_VALUE
    if is_method or name in _ASSIGNMENTS or name in _SHARES_MEMORY:
        yield from _absent(args[:1] or list(kwargs.values())[:1])
    if "out" in kwargs:
        yield from _absent((kwargs["out"],))


def _absent(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, AbsentValues):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _absent(value)


def _with_marked_views(name: str, result: Any, absent: Sequence[Tensor]) -> Any:
    """The result; what shares memory with placeholders rejects writes, which would be lost too."""
    if type(result) in (list, tuple):
        return type(result)(_with_marked_views(name, part, absent) for part in result)
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    if torch._C._functorch.is_functorch_wrapped_tensor(result):
        return result
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    is_view = name in _VIEWS_IF_CONTIGUOUS or any(is_alias(result, each) for each in absent)
    return result.as_subclass(AbsentValues) if is_view else result


def _is_recorded(result: Any) -> bool:
    """Whether autograd has recorded how a result was computed."""
    if isinstance(result, Tensor):
        return result.grad_fn is not None
    return isinstance(result, (list, tuple)) and any(map(_is_recorded, result))


def _message(tensor: Tensor, what: str) -> str:
    return (
        f"{what} a parameter of shape {tuple(tensor.shape)} whose values are not on this rank now: "
        "at stage 3 a parameter is sharded outside the forward of its module. Between steps, enter "
        "`with optimizer.full_parameters(writeback=True):` on every rank to write, and without "
        "writeback to read. A loss that uses parameters outside the forward of their modules "
        "needs stage 2, or units=[...] with a module whose forward computes that part of the loss"
    )


_COPIED = (
    "the model is copied or pickled while its parameters are sharded, so the copy would have NaN "
    "for every value. Enter `with optimizer.full_parameters():` on every rank for "
    "copy.deepcopy(model), and save weights with optimizer.save_model(path)"
)
