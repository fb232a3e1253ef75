"""Hooks on the modules of a model, which do nothing in copies of the model.

`copy.deepcopy` and `torch.save` copy a module with its hooks. A copy has its own parameters, so the
hooks must not refer to the engine there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Removable(Protocol):
    """A change of the model that can be taken back, such as a hook."""

    def remove(self) -> None: ...


class ModelHook:
    """A hook of the engine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_hook, ()


def _copied_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: Any) -> None:
    """The hook of a copy."""
