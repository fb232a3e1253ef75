"""The settings of a step that must be equal on all ranks: every rank updates its part with its own.

They are compared in the exchange that closes the step, by a number that is computed on the host. A
setting that is a tensor is not read on the host: its checksum travels with the gradient norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

UPDATES = "the number of updates since the last load"
REMOVED = "the list of parameters whose .grad is None"
LATER = "what the last update was taken with, beside the settings that were compared,"

_Key = str | tuple[str, int]
"""A name, or a key of the param group with this index."""

_ODD = 0x1E3779B97F4A7C15
_NONE, _NAN, _TENSOR, _OTHER = "none", "nan", "tensor", "other"
"""In place of the numbers of values that have none."""


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group: all but its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class StepSettings:
    """What this rank takes a step with."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        updates: int,
        later: str = "",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale: Tensor | None = None,
        has_hooks: bool = False,
    ) -> None:
        """
        Args:
            updates: how many updates this rank has applied.
            later: in the last of them, the settings of this rank that came later than the exchange
                that compared them, as text. See `later_than`.
            max_norm: to which the gradient is clipped, as far as that is known. None: not at all.
            scale: the loss scale, or its inverse.
            has_hooks: hooks run around the update. Not compared: the ranks agree after the hooks.
        """
        self.max_norm, self.norm_type = _converted(max_norm), _converted(norm_type) or 0.0
        self.has_hooks = has_hooks
        self._given: dict[_Key, Any] = {"max_norm": max_norm, "norm_type": norm_type}
        self._given |= {UPDATES: updates, LATER: later}
        self._given["the use of a loss scaler"] = scale is not None
        self._given[REMOVED] = []
        for index, group in enumerate(groups):
            self._given |= {(key, index): value for key, value in settings_in(group).items()}
        self.tensors = [] if scale is None else [("the loss scale", scale)]
        """The settings that are tensors, with their names."""
        self.tensors += [(_name(k), v) for k, v in self._given.items() if isinstance(v, Tensor)]
        self._numbers = {key: _number(value) for key, value in self._given.items()}

    def leave_out(self, removed: Sequence[str]) -> None:
        """Leave out the parameters whose `.grad` is None, of which these are all.

        It is known when the passes have been finished.
        """
        self._given[REMOVED], self._numbers[REMOVED] = removed, _number(removed)

    @property
    def digest(self) -> float:
        """Equal on ranks whose settings are equal, apart from the values of tensors."""
        return float(zlib.crc32(repr(list(self._numbers.values())).encode()))

    def check(self) -> None:
        """Raise an error for a setting that is out of range, or would spoil the parameters."""
        max_norm = self._given["max_norm"]
        if isinstance(max_norm, str) or (max_norm is not None and self.max_norm is None):
            raise TypeError(f"max_norm={max_norm!r} is a {type(max_norm).__name__}; give a number")
        if self.max_norm is not None and self.max_norm < 0:
            raise ValueError(f"max_norm={max_norm} would reverse the gradient; give at least 0")
        if not self.norm_type > 0:
            norm_type = self._given["norm_type"]
            raise ValueError(f"norm_type={norm_type!r} is no norm; give more than 0, or inf")
        if names := [_name(key) for key, number in self._numbers.items() if number == _NAN]:
            raise ValueError(f"{', '.join(names)}: nan, which the step would make of parameters")

    def later_than(self, closed: StepSettings) -> str:
        """As text, the settings that are given here and are not those of `closed`.

        Tensors that were changed in place are not among them.
        """
        changed = (
            f"{_name(key)}={_plain(value)!r}"
            for key, value in self._given.items()
            if self._numbers[key] != closed._numbers.get(key)
            if isinstance(key, tuple) or not (value is None or value is False)  # not given
        )
        return ", ".join(changed)

    def checksum(self, device: torch.device) -> Tensor:
        """A checksum of `tensors`: one int64 on `device`. The host does not synchronize."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for _, value in self.tensors:
            whole = value.detach().to(device, torch.float64, non_blocking=True).sum()
            total = total * _ODD + whole.view(torch.int64)
        return total

    def by_name(self) -> dict[str, str]:
        """All settings as text, for messages. Synchronizes with the device."""
        comparable = {k: n for k, n in self._numbers.items() if n not in (_OTHER, _TENSOR)}
        named = {_name(key): repr(_plain(self._given[key])) for key in comparable}
        return named | {name: f"tensor({_plain(value)!r})" for name, value in self.tensors}


def _name(key: _Key) -> str:
    return key if isinstance(key, str) else f"{key[0]} of param group {key[1]}"


def _converted(value: Any) -> float | None:
    """A number; None if it is none, so that `check` raises where the ranks agree on errors."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _plain(value: Any) -> Any:
    """The Python numbers in a value of PyTorch or NumPy."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> Any:
    """What has the same `repr` in every process, if the values are equal."""
    if isinstance(value, (int, float)):
        return float(value) if value == value else _NAN
    if value is None:
        return _NONE
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    if isinstance(value, Tensor):
        return _TENSOR
    return _number(_plain(value)) if hasattr(value, "tolist") else _OTHER
