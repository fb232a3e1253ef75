"""The model of a rank that the plan leaves out, whose values are old outside `full_parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle

from poplar.zero.model_hook import ModelHook


class LeftOutModel:
    """Hooks that refuse state dicts of old values, which nothing else would tell from current ones.

    A program that saves `model.state_dict()` on rank 0 runs on when rank 0 is left out.
    """

    def __init__(self, model: nn.Module, why: str) -> None:
        """`why`: the error."""
        self._model, self._why = model, why
        self._current: set[int] = set()
        """The parameters that have current values, by identity."""

    def register(self) -> Iterator[RemovableHandle]:
        """Register the hooks on all modules."""
        before_saving = ModelHook(self._before_saving)
        for module in self._model.modules():
            yield module.register_state_dict_pre_hook(before_saving)

    def _before_saving(self, module: nn.Module, *_: object) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._current:
                raise RuntimeError(self._why)

    @contextmanager
    def current(self, names: Sequence[str]) -> Iterator[None]:
        """A context in which the parameters with these names have current values."""
        known, before = dict(self._model.named_parameters()), self._current
        self._current = before | {id(known[name]) for name in names if name in known}
        try:
            yield
        finally:
            self._current = before
