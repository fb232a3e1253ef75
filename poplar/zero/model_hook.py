"""Hooks on the modules of a model, which do nothing in copies of the model.

`copy.deepcopy` and `torch.save` copy a module with its hooks. A copy has its own parameters, so the
hooks must not refer to the engine there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Removable(Protocol):
    """A change of the model that can be taken back, such as a hook."""

    def remove(self) -> None: ...


class ModelHook(functools.partial[Any]):
    """A hook of the engine. A call of it adds no frame to that of its function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_hook, ()


class EngineHook(ModelHook):
    """A hook that communicates, so that `torch.compile` runs it between graphs."""

    def __new__(cls, function: Callable[..., Any]) -> EngineHook:
        """`function`: of the module and its inputs, and of its output after a forward."""
        return super().__new__(cls, torch.compiler.disable(function))


def plain_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` itself: how a copy of the model unpickles a forward that the engine replaced."""
    return forward


def _copied_hook() -> Callable[..., None]:
    return do_nothing


def do_nothing(*_args: Any) -> None:
    """Does nothing, as the hook of a copy."""
