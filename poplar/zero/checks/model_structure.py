"""Notices that a model was changed after its optimizer was built.

Parameters that were added, replaced or unfrozen since then would not be trained. The check compares
identities only: about 0.1 microseconds per module and parameter, before every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import nn

from poplar.zero.absent_parameter import direct_access
from poplar.zero.checks.model_checks import reject_wrapped


class ModelStructure:
    """The modules and parameters of a model when the optimizer was built."""

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        self._model, self._members = model, _members(groups)
        named = dict(model.named_parameters())
        self._known = set(map(id, named.values()))
        self._parameters = list(named.values())  # keeps them, so that no other has an id of theirs
        frozen = {n: p for n, p in named.items() if not p.requires_grad}
        self._frozen_names, self._frozen = list(frozen), list(frozen.values())
        self._record()

    def _record(self) -> None:
        modules = list(self._model.modules())
        self._tables: list[dict[str, Any]] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules]
        self._sizes = [len(table) for table in self._tables]
        entries = [(table, name, table[name]) for table in self._tables for name in table]
        self._holders, self._names, self._values = map(list, zip(*entries, strict=True))

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise if the optimizer does not train the model, or its param groups, as they are now."""
        with direct_access():
            unfrozen = list(map(_requires_grad, self._frozen))
        if any(unfrozen):
            raise RuntimeError(
                f"parameter {self._frozen_names[unfrozen.index(True)]!r} was frozen when the "
                "optimizer was built and requires a gradient now, so it would not be trained; "
                "build a new optimizer after unfreezing, or freeze it again with "
                "requires_grad_(False)"
            )
        found = map(dict.get, self._holders, self._names)
        if list(map(len, self._tables)) != self._sizes or not all(map(is_, found, self._values)):
            self._check_parameters()
        if _members(groups) != self._members:
            raise RuntimeError(
                "the parameters in optimizer.param_groups were changed, but they are fixed when "
                "the optimizer is built; pass all param groups to the constructor, and freeze "
                "parameters with requires_grad_(False)"
            )

    def _check_parameters(self) -> None:
        reject_wrapped(self._model)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise RuntimeError(
                    f"parameter {name!r} was added to the model, or replaced in it, after the "
                    "optimizer was built, so it would not be trained; change the model first, or "
                    "call optimizer.release() on all ranks and build a new optimizer"
                )
        self._record()  # the same parameters, for example in modules that torch.compile wraps


_requires_grad = attrgetter("requires_grad")


def _members(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]
