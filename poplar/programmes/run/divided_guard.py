"""Refuses uses of a model that would take this rank's parts of parameters for the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class DividedGuard:
    """Until `remove`, the model's `forward` and `state_dict` raise outside of `allowed`."""

    def __init__(self, model: nn.Module) -> None:
        self._is_allowed = False
        self._handles = [
            model.register_forward_pre_hook(self._refuse_forward),
            *(
                module.register_state_dict_pre_hook(self._refuse_state)
                for module in model.modules()
            ),
        ]

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A context in which the model may be called, and its state dicts read."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def remove(self) -> None:
        """The parameters are whole again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse_forward(self, module: nn.Module, arguments: Any) -> None:
        if not self._is_allowed:
            raise RuntimeError(
                "the parameters of this model are divided over ranks by a programme, so its "
                "forward has no meaning; call train_step() or evaluate() of the training, or "
                "release() it first"
            )

    def _refuse_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._is_allowed:
            raise RuntimeError(
                "model.state_dict() would have only this rank's parts of the parameters that a "
                "programme divides over ranks; call state_dict() or save_model() of the training, "
                "on all ranks"
            )
