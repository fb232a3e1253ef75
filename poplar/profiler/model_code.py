"""The code of a model and of its loss: with a changed `forward`, a profile is measured again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from poplar.profiler.model_settings import plain

_WRAPPERS = (staticmethod, classmethod, property, MethodType, partial)


def code_of(model: nn.Module, loss_fn: Any) -> list[Any]:
    """The code of the model's modules and of the loss, as JSON content.

    All functions of the classes, and the functions and classes of the same file that these name,
    except for those of torch, which have its version. Equal in every run of a program.
    """
    values = [value for each in model.modules() for value in (type(each), *vars(each).values())]
    functions = _functions([*values, loss_fn, type(loss_fn)])
    return [
        [_content(each.__code__), plain((each.__defaults__, each.__kwdefaults__), {})]
        for each in functions
    ]


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions of classes and behind wrappers, each once; all other values are skipped."""
    rest, seen = [*values], dict[int, Any]()
    while rest:
        value = rest.pop()
        if id(value) in seen or not isinstance(value, (type, FunctionType, *_WRAPPERS)):
            continue
        seen[id(value)] = value  # no other object gets its id
        if isinstance(value, type):
            rest += [member for base in value.__mro__ for member in vars(base).values()]
        elif not isinstance(value, FunctionType):
            rest += [getattr(value, name, None) for name in ("__func__", "fget", "func")]
            rest.append(type(getattr(value, "__self__", None)))
        else:
            rest += _cells(value)
            if str(value.__globals__.get("__name__")).partition(".")[0] != "torch":
                rest += _named(value.__code__, value.__globals__)
                yield value


def _cells(function: FunctionType) -> Iterator[Any]:
    """What the function has of the function around it: a decorator's has the decorated one."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _named(code: CodeType, own: dict[str, Any]) -> Iterator[Any]:
    """The functions and classes of this module that the code names."""
    for value in (own.get(name) for name in code.co_names):
        if isinstance(value, (type, FunctionType)) and value.__module__ == own.get("__name__"):
            yield value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, own)


def _content(code: CodeType) -> list[Any]:
    """What runs, without lines and the file."""
    return [code.co_code.hex(), code.co_names, [_constant(each) for each in code.co_consts]]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _content(value)
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    # The order of a set differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
