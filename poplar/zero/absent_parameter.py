"""What a parameter is while its values are not on this rank: it can be described, not read.

Reading freed memory could crash the process, so the values are NaN. A write would be lost, and what
is computed from the values would be NaN, so both raise; shape, views and `.grad` are still there.
The class of the parameter object changes meanwhile, because torch asks the class of an argument
before it runs an operation. It does not for `torch.tensor(p)`, which copies NaN.
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
                raise _error(written, name, verb, _WRITE_ADVICE)
            read = next(_read(name, args, kwargs), None)
            if read is not None:
                raise _error_of_read(read, name)
            result = func(*args, **kwargs)
            _check_result(name, result, [*args, *kwargs.values()])
            return result

    def __deepcopy__(self, _memo: Any) -> Any:
        raise RuntimeError(_COPIED)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise RuntimeError(_COPIED)


def classes_of(parameter: nn.Parameter) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """The class of a parameter while its values are on this rank, and while they are absent."""
    cls = type(parameter)
    present = cls.__bases__[1] if issubclass(cls, AbsentValues) else cls
    return present, absent_class(present)


def mark_present(parameter: nn.Parameter) -> None:
    """Accept writes to a parameter whose values are on this rank again."""
    if issubclass(type(parameter), AbsentValues):
        parameter.__class__ = classes_of(parameter)[0]


@functools.cache
def absent_class(cls: type[Any], kind: type[AbsentValues] = AbsentValues) -> type[Any]:
    """The class of tensors of class `cls` while their values are absent."""
    return type(cls.__name__, (kind, cls), {})


_VIEWS_IF_CONTIGUOUS = {"contiguous", "ravel"}
"""Their results are views of a parameter, but copies of a placeholder."""

_ASSIGNMENTS = {f"__i{name}__" for name in ("add", "and", "floordiv", "lshift", "mod", "mul")} | {
    *(f"__i{name}__" for name in ("or", "pow", "rshift", "sub", "truediv", "xor")),
    "__setitem__",
}
_SHARES_MEMORY = {"numpy", "__array__", "__dlpack__"}
"""Other libraries could write to their results without a check."""
_WRITES_NO_VALUE = {"detach_", "requires_grad_", "rename_", "share_memory_"}
_READS_ONE_VALUE = {
    *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"),
    *("allclose", "equal", "is_nonzero", "item", "tolist"),
}
"""Their results are not tensors."""
_MAKES_ANOTHER = {"__get__", "backward", "grad", "new"}
"""Their results are gradients, or have values of their own."""
_DESCRIBES_RESULT = {"expand_as", "reshape_as", "sum_to_size", "to", "type_as", "view_as"}
"""Their other arguments say what the result looks like."""


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument."""
    is_method = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NO_VALUE
    return is_method or name in _ASSIGNMENTS


def _copies_itself(name: str, args: Sequence[Any]) -> bool:
    """As `load_state_dict` does, after the engine has loaded what this rank stores."""
    return name == "copy_" and len(args) > 1 and args[0] is args[1]


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The absent tensors to which a function writes."""
    if _copies_itself(name, args):
        return
    if _writes(name) or name in _SHARES_MEMORY:
        yield from _absent(args[:1] or list(kwargs.values())[:1])
    yield from _absent((kwargs.get("out"),))


def _read(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The absent tensors of which a function reads values, if that shows before it runs.

    After it has run, what it has written to would be NaN already.
    """
    if _copies_itself(name, args):
        return
    if _writes(name):
        yield from _absent([*args[1:], *kwargs.values()])
    elif name in _READS_ONE_VALUE or kwargs.get("out") is not None:
        yield from _absent([*args, *kwargs.values()])


def _needs_no_values(name: str, inputs: Sequence[Any]) -> bool:
    """Whether a new tensor that a function returns depends on no value of its absent arguments."""
    if name.endswith("_like") or name.startswith("new_") or name in _MAKES_ANOTHER:
        return True
    return name in _DESCRIBES_RESULT and not isinstance(inputs[0], AbsentValues)


def _absent(values: Sequence[Any]) -> Iterator[Tensor]:
    return (tensor for tensor in _tensors(values) if isinstance(tensor, AbsentValues))


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _check_result(name: str, result: Any, inputs: Sequence[Any]) -> None:
    """Raise an error if a result is computed from values; views of absent tensors become absent."""
    for tensor in _tensors(result):
        if isinstance(tensor, AbsentValues) or tensor.is_meta:
            continue
        origin = next((each for each in _tensors(inputs) if _shares_memory(tensor, each)), None)
        if isinstance(origin, AbsentValues) or name in _VIEWS_IF_CONTIGUOUS:
            tensor.__class__ = AbsentValues  # `as_subclass` would add a node to the graph
        elif origin is None and not _needs_no_values(name, inputs):
            read = next(_absent(inputs))
            raise _error_of_read(read, name)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return bool(torch._C._is_alias_of(_unwrapped(one), _unwrapped(other)))  # type: ignore[attr-defined]


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func` has wrapped, which has no memory of its own."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _error(tensor: Tensor, name: str, verb: str, advice: str) -> RuntimeError:
    return RuntimeError(
        f"{name} {verb} a parameter of shape {tuple(tensor.shape)} whose values are not on this "
        "rank now: at stage 3 a parameter is sharded outside the forward of its unit, usually a "
        f"repeated block. {advice}"
    )


def _error_of_read(tensor: Tensor, name: str) -> RuntimeError:
    advice = _CONVERSION_ADVICE if name in _CONVERSIONS else _READ_ADVICE
    return _error(tensor, name, "reads", advice)


_CONVERSIONS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}
_READ_ADVICE = (
    "Between steps, for example for an average (EMA), a norm or a penalty to log, enter `with "
    "optimizer.full_parameters():` on every rank. A loss that uses parameters outside the forward "
    "of their unit, or a model that calls a part of a block itself, needs stage 2, or units=[...] "
    "with modules whose forwards compute that part"
)
_CONVERSION_ADVICE = (
    f"For another dtype or device, convert the model before you build the optimizer. {_READ_ADVICE}"
)
_WRITE_ADVICE = (
    "Between steps, enter `with optimizer.full_parameters(writeback=True):` on every rank to write"
)
_COPIED = (
    "the model is copied or pickled while its parameters are sharded, so the copy would have NaN "
    "for every value. Enter `with optimizer.full_parameters():` on every rank for "
    "copy.deepcopy(model), and save weights with optimizer.save_model(path)"
)
