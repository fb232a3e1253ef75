"""What modules say of how they compute: attributes that are plain values, or configs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from poplar.profiler.compilation import is_compiled

_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)
_SCALARS = (Number, str, torch.dtype, Enum)
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
"""Tensors and submodules, and hooks, whose numbers count those of the whole process."""


def settings_by_module(model: nn.Module) -> list[Any]:
    """The plain attributes of each module, and whether it is compiled, as JSON content.

    They are equal in every run of a program. A counter that a forward changes is among them,
    because nothing tells it from a setting.
    """
    seen: dict[int, int] = {}
    return [
        [
            _items({k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}, seen),
            is_compiled(module),
        ]
        for module in model.modules()
    ]


def plain(value: Any, seen: dict[int, int]) -> Any:
    """JSON content of a scalar, a collection or a config, the name of a function; else None.

    Args:
        seen: numbers of the collections and configs that are known, by `id`. All modules may have
            the same one, and it may contain itself.
    """
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, _NAMED):
        return getattr(value, "__qualname__", None)
    if isinstance(value, tuple):
        return [plain(each, seen) for each in value]
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return sorted(repr(each) for each in value if isinstance(each, _SCALARS))
    content = value if isinstance(value, list) else _attributes(value)
    if content is None:
        return None
    if id(value) in seen:
        return f"as {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(content, list):
        return [plain(each, seen) for each in content]
    return _items(content, seen)


def _items(values: Mapping[Any, Any], seen: dict[int, int]) -> dict[str, Any]:
    known = {str(k): plain(v, seen) for k, v in values.items() if isinstance(k, _SCALARS)}
    # Configs of transformers have a hash of strings, which differs between processes.
    return {k: v for k, v in known.items() if v is not None and not k.endswith("_object_hash")}


def _attributes(value: Any) -> Mapping[Any, Any] | None:
    """The items of a mapping or a config: a dataclass, or an object with `to_dict`; else None.

    `to_dict` itself may leave some out: that of transformers leaves out the attention's kernel.
    """
    if isinstance(value, Mapping):
        return value
    is_config = is_dataclass(value) or hasattr(type(value), "to_dict")
    if not is_config:
        return None
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {each.name: getattr(value, each.name) for each in fields(value)}
